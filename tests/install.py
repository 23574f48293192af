"""Install the wheel with every extra in fresh environments, and run both stages from there.

    python -m tests.install [--pythons 3.11 3.12 3.13] [--overrides]

Nothing of the clone is on the path, and no lock is used. `--overrides` lifts streaming's pins, as in
docs/how-to/install.md.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.runs import UNET
from tests.tiny import make_models, make_samples, make_tar

ROOT = Path(__file__).parents[1]
EXTRAS = "precompute,train,download,s3"
UV = (sys.executable, "-m", "uv")
OVERRIDES = "numpy>=1.26\ntransformers>=4.57\n"
SHOWN = ("torch", "numpy", "transformers", "diffusers", "huggingface-hub", "mosaicml-streaming", "img2dataset", "ray")
READ_BY_STREAMING = """
from streaming import StreamingDataset
import img2dataset
dataset = StreamingDataset(local="latents/64x64", batch_size=1, shuffle=False)
assert len(dataset) == 12 and dataset[0]["image_latents"].shape == (8, 8, 8), dataset[0]
"""


def main() -> None:
    """Test each Python in turn, until the first failure."""
    parser = argparse.ArgumentParser(prog="tests.install", description=__doc__)
    parser.add_argument(
        "--pythons", nargs="+", default=["3.11", "3.12", "3.13"], help="names or paths of interpreters, as for uv"
    )
    parser.add_argument("--overrides", action="store_true", help="lift streaming's pins of numpy and transformers")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="latentmill-install-") as folder:
        run(*UV, "build", "--quiet", "--wheel", "--out-dir", folder, str(ROOT), cwd=ROOT)
        (wheel,) = Path(folder).glob("*.whl")
        make_models(Path(folder) / "models")
        make_tar(Path(folder) / "tars", "00000", make_samples(0, 12, [(80, 64)]))
        for python in options.pythons:
            place = Path(folder) / Path(python).name.replace("/", "-")
            place.mkdir()
            print(install(place, python, wheel, options.overrides), flush=True)
            print(use(place, Path(folder)), flush=True)


def install(place: Path, python: str, wheel: Path, overrides: bool) -> str:
    """Create PLACE/venv with the wheel and every extra, and return its path and packages."""
    begin = time.monotonic()
    run(*UV, "venv", "--quiet", "--python", python, str(place / "venv"), cwd=place)
    (place / "overrides.txt").write_text(OVERRIDES if overrides else "")
    into = ("--python", str(place / "venv" / "bin" / "python"))
    # from a separate folder, because the clone's pyproject.toml has overrides
    past = ("--overrides", "overrides.txt")
    run(*UV, "pip", "install", "--quiet", *into, *past, f"latentmill[{EXTRAS}] @ {wheel.as_uri()}", cwd=place)
    seconds = time.monotonic() - begin
    listed = run(*UV, "pip", "list", "--quiet", "--format", "freeze", *into, cwd=place).splitlines()
    shown = [line.replace("==", " ") for line in listed if line.split("==")[0] in SHOWN]
    version = run(str(place / "venv" / "bin" / "python"), "--version", cwd=place).strip()
    return f"{version}: {len(listed)} packages in {seconds:.0f} s; {', '.join(shown)}"


def use(place: Path, world: Path) -> str:
    """Run both stages, the export and checks, all with the commands that the wheel installs."""
    begin = time.monotonic()

    def command(name: str, *words: str, code: int = 0) -> str:
        return run(str(place / "venv" / "bin" / name), *words, cwd=place, code=code)

    command("latentmill", "init", ".")
    command("latentmill", "init", ".", code=2)
    for name in ("select", "download", "precompute", "train", "shards", "plan"):
        command(f"latentmill-{name}", "--help")
    command("latentmill-plan")
    names = {"vae": "vae", "texts.text.model": "text_encoder", "texts.text.tokenizer": "tokenizer"}
    models = [word for field, name in names.items() for word in (f"--{field}", str(world / "models" / name))]
    workers = ["--workers.num_gpus", "0", "--workers.num_cpus", "1", "--workers.decode_threads", "2"]
    paths = ["--input", str(world / "tars"), "--output", "latents", "--buckets", '["64x64"]', "--precision", "float32"]
    command("latentmill-precompute", "--config", "configs/precompute.yaml", *paths, *models, *workers)
    assert "is intact" in command("latentmill-shards", "verify", "latents")
    sizes = [
        "--max_steps",
        "2",
        "--global_batch_size",
        "4",
        "--microbatch_size",
        "2",
        "--data.num_canonical_nodes",
        "4",
    ]
    cheap = ["--backbone.config", str(UNET), "--precision", "float32", "--compile", "false", "--data.num_workers", "1"]
    stream = ["--data.root", "latents", "--data.bucket", "64x64"]
    command("latentmill-train", "--config", "configs/phase1.yaml", *stream, *sizes, *cheap)
    command("latentmill-train", "export", "runs/phase1", "--output", "exported")
    assert (place / "exported" / "model_index.json").is_file()
    command("python", "-c", READ_BY_STREAMING)
    return f"  configs, both stages, export, verify, streaming's own reader: {time.monotonic() - begin:.0f} s"


def run(*words: str, cwd: Path, code: int = 0) -> str:
    """Run a command without this clone in its environment, and return its output."""
    ours = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environment = {key: value for key, value in os.environ.items() if key not in ours} | {"HF_HUB_OFFLINE": "1"}
    result = subprocess.run(words, cwd=cwd, capture_output=True, text=True, env=environment)
    if result.returncode != code:
        sys.exit(f"{' '.join(words)} ended with {result.returncode}:\n{result.stdout[-4000:]}{result.stderr[-8000:]}")
    return result.stdout


if __name__ == "__main__":
    main()
