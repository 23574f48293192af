"""Rehearse bench/gpu_check.sh on the CPU, from a clean export of HEAD, in an environment like that of a lent GPU
machine.

    python -m tests.rehearsal [--python 3.12] [--minutes 80] [what bench.gpu_check takes]

The environment has only the packages of such a machine, `THERE`. `bench/gpu_check.sh wheels` brings the others, at most
`MOST_CARRIED`. Installing needs a package index; the check itself does not.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.install import ROOT, UV, run

THERE = [
    *("torch==2.11.0", "transformers==5.17.*", "accelerate==1.15.*", "numpy==2.5.*"),
    *("pyarrow", "pillow", "xxhash"),
]
ABSENT = ("diffusers", "pydantic", "streaming", "ray", "torchvision", "matplotlib")
LOOK = """
import importlib.util, sys
print("{}.{}".format(*sys.version_info), *filter(importlib.util.find_spec, sys.argv[1:]))
"""
MOST_CARRIED = 64 << 20
"""Bytes of wheels and of the folder of torchao."""


def main() -> None:
    """Install, export, fetch and check; exit with the check's exit code."""
    parser = argparse.ArgumentParser(prog="tests.rehearsal", description=__doc__)
    parser.add_argument("--python", default="3.12", help="version or path of an interpreter, as for uv")
    parser.add_argument("--minutes", default="80", help="of the check")
    options, more = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="latentmill-rehearsal-") as folder:
        place, clone = Path(folder), Path(folder) / "clone"
        python, version = machine(place, options.python)
        export(clone)
        say(run("env", f"PYTHON={python}", "bash", "bench/gpu_check.sh", "wheels", version, cwd=clone))
        carried = sum(path.stat().st_size for name in (".wheels", ".torchao") for path in (clone / name).rglob("*"))
        assert carried <= MOST_CARRIED, f"{carried} bytes of wheels and torchao"
        words = ["bash", "bench/gpu_check.sh", "--output", str(place / "found"), "--device", "cpu", "--small"]
        words += ["--minutes", options.minutes, *more]
        check = subprocess.run(["env", "-u", "PYTHONPATH", f"PYTHON={python}", *words], cwd=clone)
        page = place / "found" / "gpu-check.md"
        if page.is_file():  # invalid requests are reported before the environment exists
            say(page.read_text())
    sys.exit(check.returncode)


def machine(place: Path, version: str) -> tuple[Path, str]:
    """Create the environment, and return its interpreter and version."""
    python = place / "venv" / "bin" / "python"
    run(*UV, "venv", "--quiet", "--seed", "--python", version, str(place / "venv"), cwd=place)
    run(*UV, "pip", "install", "--quiet", "--python", str(python), *THERE, cwd=place)
    # may have been installed as a dependency of typer
    run(*UV, "pip", "uninstall", "--quiet", "--python", str(python), "pydantic", "pydantic-core", cwd=place)
    listed = run(*UV, "pip", "list", "--quiet", "--format", "freeze", "--python", str(python), cwd=place).split()
    version, *found = run(str(python), "-c", LOOK, *ABSENT, cwd=place).split()
    assert not found, f"the machine must not have {found}"
    names = [name.split("=")[0] for name in THERE]
    say(f"A machine with Python {version}, {', '.join(line for line in listed if line.split('==')[0] in names)}.")
    return python, version


def export(clone: Path) -> None:
    """Export HEAD's files and nothing else."""
    clone.mkdir()
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x"], cwd=clone, input=archive, check=True)


def say(text: str) -> None:
    """Print and flush, because the next step takes long."""
    print(text.strip(), flush=True)


if __name__ == "__main__":
    main()
