"""Who is missing where a collective fails: silent, failed, never come, behind, or nobody."""

import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests import ranks
from tests.runs import train_fields, write_config
from train.data.loader import Loader
from train.run.health import heartbeat
from train.run.health.heartbeat import FAILED, LEFT, Beat, HeartbeatReporter, who_is_missing

NOW = 1000.0
LOOP = ("loading", "training", "logging")


def beat(rank: int, passed: int, at: str | None = None, since: float = 400.0) -> Beat:
    """Of a rank in a loop of three things."""
    return Beat(rank, "b", 4000 + rank, passed // 3, at or LOOP[passed % 3], passed, NOW - since, NOW - 1)


def test_a_rank_that_waits_for_its_data_is_named_and_where_the_others_are() -> None:
    missing = who_is_missing([beat(0, 10), beat(1, 9), beat(2, 10)], (), NOW)
    assert missing.ranks == {1}
    assert missing.words == (
        "rank 1 (host b, process 4001) is after step 3, loading, since 400 s; the others are after step 3, training"
    )


def test_every_state_of_three_ranks_names_those_to_look_at() -> None:
    """Never come, failed or silent first; then whoever is behind; those that left because of others never."""
    for kinds in itertools.product(("behind", "ahead", "silent", "failed", "left", "absent"), repeat=3):
        beats: list[Beat | None] = []
        for rank, kind in enumerate(kinds):
            at = {"failed": f"{FAILED}OutOfMemoryError: full", "left": LEFT}.get(kind)
            beats.append(None if kind == "absent" else beat(rank, 9 if kind == "behind" else 10, at))
        gone = {rank for rank, kind in enumerate(kinds) if kind in ("silent", "left")}
        missing = who_is_missing(beats, gone, NOW)
        worst = {rank for rank, kind in enumerate(kinds) if kind in ("silent", "failed", "absent")}
        behind = {rank for rank, kind in enumerate(kinds) if kind == "behind"}
        assert missing.ranks == (worst or (behind if len(behind) < 3 else set())) or not missing.ranks
        assert bool(missing.ranks) == bool(worst or 0 < len(behind) < 3), kinds
        for rank in missing.ranks:
            assert f"rank {rank} " in missing.words
    assert (
        "ended after step 3: OutOfMemoryError: full"
        in who_is_missing([beat(0, 9, f"{FAILED}OutOfMemoryError: full")], (), NOW).words
    )
    assert (
        "all 2 ranks live, and are after step 3, training, for up to 400 s"
        in who_is_missing([beat(0, 10), beat(1, 10, since=3)], (), NOW).words
    )
    assert (
        "has given no sign of life for 1 s; it was after step 3, loading"
        in who_is_missing([beat(0, 9), beat(1, 10)], {0}, NOW).words
    )


def test_a_thousand_ranks_make_no_long_message() -> None:
    words = who_is_missing([beat(rank, 9 + (rank > 500)) for rank in range(1000)], (), NOW).words
    assert words.count("process") == heartbeat.NAMED and " and 497 more" in words and len(words) < 500


def test_what_a_rank_is_at_reaches_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a real store; one that fell silent, one that never came; and the time that is spent on loading."""
    monkeypatch.setattr(heartbeat, "BEAT", 0.05)
    monkeypatch.setattr(heartbeat, "SILENT", 0.3)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    heartbeats = [HeartbeatReporter(rank, 3, dist.PrefixStore("a", store).clone()).start() for rank in range(2)]
    for step in range(3):
        for each in heartbeats:
            each.at(step, "loading")
            each.at(step, "training")
    heartbeats[1].at(3, "loading")
    time.sleep(0.2)
    heartbeats[1].at(3, "training")
    time.sleep(0.2)
    heartbeats[1].close()
    heartbeats[1].thread.join()
    missing = heartbeats[0].missing()
    assert missing is not None and missing.ranks == {1, 2}
    assert "rank 1 (host " in missing.words and "it was after step 3, training" in missing.words
    assert "rank 2 never came" in missing.words and "the others are after step 2, training" in missing.words
    assert heartbeats[0].explained().startswith("Rank 2 never came") or heartbeats[0].explained().startswith(
        "Rank 1 (host"
    )
    last = heartbeats[0].everyone()
    assert last[2] is None and last[1] is not None and 0.15 < last[1].loading < 2
    heartbeats[1].fail(MemoryError("no more"))
    told = heartbeats[0].missing()
    assert told is not None and "ended after step 3: MemoryError: no more" in told.words
    heartbeats[0].close()
    alone = HeartbeatReporter().start()
    alone.at(1, "loading")
    assert [each and each.at for each in alone.everyone()] == ["loading"] and alone.explained() == ""


def blocked(arguments: list[str]) -> None:
    """The trainer, whose rank 1 gets no batch after two steps, and no error either."""
    from train.__main__ import run

    batches = Loader.__iter__

    def stuck(self: Loader) -> Iterator[Any]:
        for number, batch in enumerate(batches(self)):
            if number == 2 and os.environ["RANK"] == "1":
                time.sleep(600)
            yield batch

    Loader.__iter__ = stuck  # type: ignore[method-assign,assignment]
    run(arguments)


def test_a_rank_that_is_stuck_in_its_loader_is_named(latents: Path, tmp_path: Path) -> None:
    """After half of the time limit one rank warns; after all of it each of the others ends, and names it."""
    fields = train_fields(latents, tmp_path / "run", max_steps=1000, global_batch_size=12, collective_timeout=11.0)
    program = f"{__name__}:{blocked.__name__}"
    arguments = ["--config", str(write_config(tmp_path, fields))]
    first, second, third = ranks.start(tmp_path / "log", arguments, 3, program=program)
    assert ranks.wait([first, third], 120) == [1, 1], (tmp_path / "log").read_text()
    second.kill()
    second.join()
    said = " ".join((tmp_path / "log").read_text().split())
    name = f"(host {os.uname().nodename}, process {second.pid}) is after step 2, loading, since "
    assert said.count(f"warning: rank 1 {name}") == 1 and "After 11 s the run ends." in said
    assert said.count(f"Rank 1 {name}") == 2 and "; the others are after step 2, training." in said
