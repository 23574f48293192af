"""Benchmarks whose commands stand in docs, and that would rot unseen where nothing runs them."""

from argparse import Namespace
from pathlib import Path

import pytest

from bench.outputs import defaults, text_unet
from bench.outputs.download import download, served
from bench.outputs.image_storage import STORAGES
from bench.outputs.text_unet import unet_table


def test_losses_of_storages_in_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed = "int8, mean, float8, trim"
    monkeypatch.setattr(text_unet, "VALIDATION_SAMPLES", 16)
    storages = {name: STORAGES[name] for name in ("float16", trimmed)}
    *_, exact, other = unet_table(tmp_path, storages, num_samples=32, steps=1, seeds=2).splitlines()
    unchanged = "+0.00% (+0.00% to +0.00%)"
    assert exact == f"| float16 | {unchanged} | {unchanged} |"
    assert other.startswith(f"| {trimmed} | ") and other.count("%") == 6 and unchanged not in other


def test_losses_of_the_defaults_in_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way is trained as it says; what is compiled takes too long here."""
    monkeypatch.setattr(defaults, "VALIDATION_SAMPLES", 16)
    monkeypatch.setattr(text_unet, "VALIDATION_SAMPLES", 16)
    ways = ("nothing of it", "image.storage int8, text.storage float8", "precision bfloat16")
    monkeypatch.setattr(defaults, "WAYS", {way: defaults.WAYS[way] for way in ways})
    found = defaults.losses_of(tmp_path, samples=32, steps=2, seeds=1)
    assert list(found) == list(ways) and len({losses[0] for losses in found.values()}) == 3


def test_every_picture_is_downloaded(tmp_path: Path) -> None:
    with served(num_bytes=1000) as address:
        seconds, processor = download(tmp_path, address, Namespace(pictures=20, threads=4))
    assert seconds > 0 and processor > 0
    (tar,) = (tmp_path / "tars").glob("*.tar")
    assert tar.stat().st_size > 20 * 1000
