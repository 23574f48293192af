"""Several tars in flight in one worker: the device never idles between them, as it does with one at a time."""

import threading
from collections.abc import Generator
from pathlib import Path
from typing import TypeVar

import pytest

from precompute.encode.overlap import Turns
from shards.base.pool import in_background
from shards.open import open_store
from shards.root.index import write_indexes
from shards.tools.verify import verify_root
from tests.fixtures import SIZES, precompute_config
from tests.sleeping import Device, encode_asleep
from tests.tiny import make_samples, make_tar

NUM_TARS = 3
Item = TypeVar("Item")


def at_device(turns: Turns, items: Generator[Item, None, None]) -> Generator[Item, None, None]:
    with turns.at_device(items) as held:
        yield from held


def test_the_device_stays_busy_while_tars_begin_and_end(models: Path, tmp_path: Path) -> None:
    for number in range(NUM_TARS):
        make_tar(tmp_path / "tars", f"{number:05d}", make_samples(number, 24, SIZES))
    rests = {}
    for at_once in (1, 3):
        config = precompute_config(models, tmp_path / "tars", tmp_path / f"root-{at_once}", buckets=["64x64"])
        device = Device(0.25)
        books = encode_asleep(config, device, at_once)
        write_indexes(open_store(config.output))
        assert list(verify_root(open_store(config.output))) == []
        assert len(device.work) == 3 * NUM_TARS and sum(tar.encoded for tar in books) == 18 * NUM_TARS
        rests[at_once] = device.rests
        print(f"{at_once} at once: {device.busy:.2%} busy, {device.rests} rests in {len(device.work)} batches")
    assert rests == {1: NUM_TARS, 3: 1}


def test_a_turn_ends_with_its_items_or_when_its_consumer_stops() -> None:
    turns, made = Turns(), threading.Semaphore(0)

    def items(name: str) -> Generator[str, None, None]:
        for number in range(3):
            made.release()
            yield f"{name}{number}"

    first = at_device(turns, items("a"))
    assert next(first) == "a0"
    second = in_background(at_device(turns, items("b")), ahead=1)
    waiting = threading.Thread(target=lambda: seen.append(next(second)))
    seen: list[str] = []
    made.acquire()
    waiting.start()
    assert made.acquire(timeout=60)  # the second one's first item is made …
    waiting.join(0.2)
    assert not seen  # … and waits for the device
    assert list(first) == ["a1", "a2"]
    waiting.join(60)
    assert seen == ["b0"] and turns.device.locked()
    second.close()
    assert not turns.device.locked()
    assert list(at_device(turns, items("c"))) == ["c0", "c1", "c2"]


def test_an_error_during_a_turn_frees_the_device() -> None:
    turns = Turns()

    def items() -> Generator[int, None, None]:
        yield 1
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        list(at_device(turns, items()))
    assert not turns.device.locked()
    empty: list[int] = []
    assert list(at_device(turns, (i for i in empty))) == []
