"""One bit flipped anywhere in a latents root: `shards verify` names the file."""

import itertools
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest

from shards.base.durable import DamagedFile, sealed_json
from shards.open import open_store
from shards.root.commit import recall
from shards.root.committed import load_receipts
from shards.tools.verify import verify_root
from tests.faults.world import make_world
from tests.fixtures import Record, encode_all


@pytest.mark.slow
def test_twelve_hundred_flips(models: Path, tmp_path: Path, record_property: Record, seed: int) -> None:
    record_property("flips", flip(root_of(models, tmp_path), 1200, seed))


def test_some_flips(models: Path, tmp_path: Path, seed: int) -> None:
    flip(root_of(models, tmp_path), 60, seed)


def root_of(models: Path, folder: Path) -> Path:
    """Make a root of two small tars, with a part that was recalled and re-encoded."""
    world = make_world(folder, models, num_shards=2, num_samples=3)
    root = shutil.copytree(world.reference, folder / "root")
    receipt = load_receipts(open_store(root))[0]
    recall(open_store(root), {receipt.name: receipt.token}, "a test")
    encode_all(world.config(root))
    units = {"version": 1, "origin": {}, "units": [[["00000.jpg", 100, 1]]]}  # as for a folder of images
    open_store(root).create("inputs/00000.json", sealed_json(units))
    return root


def kind_of(name: str) -> str:
    """Classify a file: `64x64/00000.3fa9c1d2/index.json` → `part index.json`, and so on."""
    parts = name.split("/")
    if len(parts) == 1:
        return name
    if parts[0] in ("commits", "tars", "inputs", "rules"):
        return f"{parts[0]} {name.rpartition('.')[2]}"
    return f"part {parts[2]}" if len(parts) == 3 else "merged index.json"


def flip(root: Path, number: int, seed: int) -> dict[str, object]:
    """Flip `number` bits, one at a time, cycling through the kinds of file."""
    rng = random.Random(seed)
    kinds: dict[str, list[Path]] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_file() and not name.startswith("."):
            kinds.setdefault(kind_of(name), []).append(path)
    assert list(verify_root(open_store(root))) == []
    flipped: Counter[str] = Counter()
    detected: Counter[str] = Counter()
    for kind in itertools.islice(itertools.cycle(kinds), number):
        path = rng.choice(kinds[kind])
        data = path.read_bytes()
        bit = rng.randrange(8 * len(data))
        path.write_bytes(data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :])
        try:
            found = list(verify_root(open_store(root)))
        except DamagedFile as error:
            found = [str(error)]
        flipped[kind] += 1
        detected[kind] += any(str(path) in line for line in found)
        path.write_bytes(data)
    assert detected == flipped
    return {"flipped": flipped.total(), "detected": detected.total(), "by kind": dict(flipped)}
