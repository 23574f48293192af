"""What a clean machine depends on: entry points, the lock, and files that must not be in the repository."""

import re
import subprocess
from importlib.metadata import entry_points
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_console_entry_points_load() -> None:
    ours = [point for point in entry_points(group="console_scripts") if point.name.startswith("latentmill-")]
    commands = {point.name.removeprefix("latentmill-") for point in ours}
    assert commands == {"select", "download", "precompute", "shards", "train", "plan"}
    for point in ours:
        assert callable(point.load())


def test_the_lock_pins_everything_and_names_no_index() -> None:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pinned = {line.split("==")[0]: line for line in lines if line and not line.startswith((" ", "#"))}
    assert all("==" in line for line in pinned.values())
    assert not re.search(r"https?://|--index|--extra|--find-links", "\n".join(pinned.values()))
    for name in ("torch", "torchvision", "mosaicml-streaming", "ray", "diffusers", "transformers", "accelerate"):
        assert name in pinned
    assert pinned["mosaicml-streaming"].startswith("mosaicml-streaming==0.13.0")


def test_no_large_or_generated_file_is_tracked() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        path = ROOT / name
        assert not path.is_file() or path.stat().st_size <= 2_000_000, name
        assert "__pycache__" not in name and not name.startswith(("runs/", ".venv/"))
