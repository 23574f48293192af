"""Install the packages of requirements.lock into .venv (`make setup`).

This runs before any package is installed. It must run with any Python from 3.6 on, to report an unsupported one.
"""

import shutil
import subprocess
import sys
from pathlib import Path

VENV = Path(".venv")
PYTHON = VENV / "bin" / "python"
UV = VENV / "bin" / "uv"
LOG = VENV / "setup.txt"
VERSIONS = [(3, 11), (3, 12), (3, 13)]
GIGABYTES = 8
"""Disk space that .venv takes."""
CAUSES = {
    ("no space left",): (
        f"the disk is full: .venv needs {GIGABYTES} GB here, and uv's cache as much if it is on another disk"
    ),
    ("error sending request", "failed to fetch", "dns error", "no matching distribution", "failed to establish"): (
        "the package registry cannot be reached: check the network, or set PIP_INDEX_URL and UV_DEFAULT_INDEX"
    ),
}
"""Texts in the output of pip and uv, in lower case → what has happened."""


def main() -> None:
    """Create .venv if necessary, and install exactly the locked packages."""
    version = sys.version_info[:2]
    if version not in VERSIONS:
        fail(
            f"latentmill needs Python 3.11, 3.12 or 3.13, but {sys.executable} is {version[0]}.{version[1]}. Try: "
            f"make PYTHON=python3.13 {' '.join(sys.argv[1:])}".strip()
        )
    free = shutil.disk_usage(".").free / 1e9
    if not can_install():
        if free < GIGABYTES:
            fail(f"The packages need {GIGABYTES} GB of disk space, but only {free:.1f} GB are free in {Path.cwd()}.")
        print("Installing the packages into .venv. This takes about a minute, or as long as the download.", flush=True)
        if subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], capture_output=True).returncode:
            shutil.rmtree(VENV, ignore_errors=True)
            fail(
                f"{sys.executable} cannot create virtual environments. On Debian and Ubuntu, install the package "
                f"python{version[0]}.{version[1]}-venv."
            )
    LOG.write_text("")
    if not UV.exists():
        run(str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check", "--retries", "1", "uv")
    run(str(UV), "pip", "sync", "--compile-bytecode", "--python", str(PYTHON), "requirements.lock")
    run(str(UV), "pip", "install", "--python", str(PYTHON), "--no-deps", "--editable", ".")


def can_install() -> bool:
    """Return whether .venv exists and can install packages. It cannot if its Python was removed, or if an earlier
    set-up was interrupted while the environment was being created."""
    if not PYTHON.exists():
        return False
    return UV.exists() or not subprocess.run([str(PYTHON), "-m", "pip", "--version"], capture_output=True).returncode


def run(*command: str) -> None:
    """Run a command, add its output to the log, and end with one sentence if it fails."""
    with LOG.open("a") as log:
        failed = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode
    if failed:
        said = LOG.read_text()
        causes = (cause for texts, cause in CAUSES.items() if any(text in said.lower() for text in texts))
        lines = [line for line in said.splitlines() if "error" in line.lower()] or said.splitlines() or [""]
        cause = next(causes, f"{command[0]} failed with the message: {lines[0].strip()}")
        fail(f"The packages could not be installed, because {cause}. The full output is in {LOG.absolute()}.")


def fail(sentence: str) -> None:
    """End with an error."""
    sys.exit(f"error: {sentence}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        fail("The set-up was interrupted. Run the same command again to continue.")
