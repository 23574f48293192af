"""An image that kills its decoder costs only its own sample."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from precompute.input.reject import Reject
from precompute.pixels.decode import LimitsConfig, PixelsConfig, decode
from precompute.pixels.isolation import Isolated
from shards.base.errors import Stuck, WorkError
from shards.format.buckets import Bucket
from shards.open import open_store
from shards.tools.verify import verify_root
from tests.faults.decoders import imported, killed_once, poisoned
from tests.fixtures import SIZES, encode_all, folder_of, precompute_config
from tests.roots import load_tars, part_of, rejects, tree
from tests.tiny import make_samples, make_tar, picture

pytestmark = pytest.mark.heavy

LIMITS = LimitsConfig(decode_seconds=1, decode_bytes=1 << 32)
SMALL = [Bucket(64, 64)]
SOUND = picture(np.random.default_rng(0), 80, 70)


HEAVY = {"ray", "diffusers", "transformers", "streaming"}


@pytest.fixture
def one_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reject at the first death, because a child takes seconds to start."""
    monkeypatch.setattr("precompute.pixels.isolation.TRIES", 1)


def test_a_child_returns_what_a_thread_does_and_raises_what_it_raises(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Although the first child is killed by chance, and the children print to stdout. They import light."""
    (tmp_path / "sitecustomize.py").write_text("print('Using a library', flush=True)")
    monkeypatch.syspath_prepend(tmp_path)
    here = decode(SOUND, SMALL, PixelsConfig(), LIMITS)
    with Isolated(killed_once, LIMITS) as isolated:
        there = isolated(b"%s/seen\n%s" % (bytes(tmp_path), SOUND), SMALL, PixelsConfig(), LIMITS)
        assert len(isolated.children) == 2
        scores = [Path(f"/proc/{child.process.pid}/oom_score_adj") for child in isolated.children if child.ready]
        assert [score.read_text().strip() for score in scores if score.exists()] == ["1000"]
        assert there.pixels[SMALL[0]].tobytes() == here.pixels[SMALL[0]].tobytes()
        assert (there.width, there.height, there.corners) == (here.width, here.height, here.corners)
        with pytest.raises(Reject, match="cannot identify") as caught:
            isolated(b"<html>", SMALL, PixelsConfig(), LIMITS)
        assert caught.value.reason == "not_an_image"
        any_call: Any = isolated
        any_call.function = imported
        assert not HEAVY & set(any_call())


def test_what_kills_a_decoder_is_rejected_and_the_next_picture_is_not(
    one_try: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decoder that sleeps is killed by the wall-clock limit."""

    def reject(poison: bytes) -> tuple[str, str]:
        with pytest.raises(Reject) as caught:
            isolated(poison, SMALL, PixelsConfig(), LIMITS)
        return caught.value.reason, str(caught.value)

    with Isolated(poisoned, LIMITS) as isolated:
        assert reject(b"MEMORY") == ("decoder_crash", "needed more than 4294967296 bytes of memory")
        assert reject(b"LOOP") == ("decoder_crash", "used more than 1 s of CPU time")
        assert isolated(SOUND, SMALL, PixelsConfig(), LIMITS).width == 80
        monkeypatch.setattr("precompute.pixels.isolation.CLOCK_PER_PROCESSOR_SECOND", 1)
        assert reject(b"SLEEP") == ("decoder_crash", "did not finish within 1 s")
        children = [child.process for child in isolated.children]
        assert children[-1].poll() is not None
    assert all(child.poll() is not None for child in children)


@pytest.mark.parametrize(
    ("code", "seconds", "message"),
    [
        ("import os; os._exit(3)", 300.0, "decoder process failed to start: exit code 3"),
        ("import os; os._exit(0)", 300.0, "decoder process failed to start: exit code 0"),
        ("import time; time.sleep(600)", 0.5, r"decoder process failed to start: not ready after 0\.5 s"),
    ],
)
def test_a_child_that_does_not_start_is_not_the_images_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, seconds: float, message: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(f"import sys; print('hello', flush=True)\n{code}")
    monkeypatch.setattr("precompute.pixels.isolation.START_SECONDS", seconds)
    monkeypatch.syspath_prepend(tmp_path)
    with Isolated(decode, LIMITS) as isolated, pytest.raises(WorkError, match=message):
        isolated(SOUND, SMALL, PixelsConfig(), LIMITS)


def test_the_rest_of_a_poisoned_shard_survives_byte_for_byte(one_try: None, models: Path, tmp_path: Path) -> None:
    """Compare the second attempt, which decodes in child processes, with one in threads, which rejects the poisoned
    files because they are not images."""
    samples = make_samples(0, 12, SIZES)
    poisons = [(f"00000900{i}", {"jpg": poison, "txt": b"x"}) for i, poison in enumerate((b"ABORT", b"EXIT"))]
    make_tar(tmp_path / "tars", "00000", [*samples[:5], poisons[0], *samples[5:], poisons[1]])
    workers = {"num_gpus": 0, "num_cpus": 1, "decode_threads": 1, "batch_size": 8}
    one, two = (
        precompute_config(models, tmp_path / "tars", tmp_path / name, limits={"decode_seconds": 1}, workers=workers)
        for name in ("one", "two")
    )
    encode_all(one)
    encode_all(two, attempt=2, decode=poisoned)
    assert list(verify_root(open_store(two.output))) == []
    receipt = load_tars(open_store(two.output))[0]
    assert receipt.rejected == {"decoder_crash": 2, "too_small": 3} and receipt.parts["64x64"].attempts == 2
    listed = rejects(folder_of(two), "00000")
    crashes = {row["key"]: row["detail"] for row in listed if row["reason"] == "decoder_crash"}
    assert crashes == {poisons[0][0]: "killed by SIGABRT", poisons[1][0]: "exit code 3"}
    for bucket in ("64x64", "128x128"):
        expected, found = (tree(part_of(folder_of(config), bucket, "00000")) for config in (one, two))
        assert expected.keys() == found.keys()
        assert {name for name in expected if expected[name] != found[name]} == {"refused.parquet"}


def test_a_thread_that_does_not_end_is_not_waited_for(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempt ends and removes its folder; ending the process is up to the caller."""
    monkeypatch.setattr("precompute.encode.stages.CLOCK_PER_PROCESSOR_SECOND", 0.2)
    make_tar(tmp_path / "tars", "00000", [*make_samples(0, 3, SIZES), ("000009999", {"jpg": b"NAP", "txt": b"x"})])
    config = precompute_config(models, tmp_path / "tars", tmp_path / "root", limits={"decode_seconds": 1})
    with pytest.raises(Stuck, match=r"timed out after 0\.2 s"):
        encode_all(config, decode=poisoned)
    assert not list((folder_of(config) / ".attempts").iterdir())
