"""Heartbeats name the ranks to look at: those that failed, are silent, never joined, or are behind the others."""

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
from train.run.health.heartbeat import FAILED, LEAVING, HeartbeatReporter, RankStatus, find_missing_ranks

NOW = 1000.0
STAGES = ("loading", "training", "logging")


def make_status(rank: int, num_stages: int, stage: str | None = None, seconds: float = 400.0) -> RankStatus:
    """Build the status of a rank that repeats STAGES, one round per step, and entered a stage `seconds` before NOW."""
    stage = stage or STAGES[num_stages % 3]
    return RankStatus(rank, "b", 4000 + rank, num_stages // 3, stage, num_stages, NOW - seconds, NOW - 1)


def test_a_rank_that_waits_for_data_is_named_with_the_stage_of_the_others() -> None:
    missing = find_missing_ranks([make_status(0, 10), make_status(1, 9), make_status(2, 10)], (), NOW)
    assert missing.ranks == {1}
    assert missing.message == (
        "rank 1 (host b, process 4001) has been loading after step 3 for 400 s; the others are training after step 3"
    )


def test_every_combination_of_three_ranks_names_those_to_look_at() -> None:
    """Ranks that are absent, failed or silent come first, then those that are behind. Ranks that end because others
    are missing are never named."""
    for kinds in itertools.product(("behind", "ahead", "silent", "failed", "leaving", "absent"), repeat=3):
        statuses: list[RankStatus | None] = []
        for rank, kind in enumerate(kinds):
            stage = {"failed": f"{FAILED}OutOfMemoryError: full", "leaving": LEAVING}.get(kind)
            statuses.append(None if kind == "absent" else make_status(rank, 9 if kind == "behind" else 10, stage))
        silent = {rank for rank, kind in enumerate(kinds) if kind in ("silent", "leaving")}
        missing = find_missing_ranks(statuses, silent, NOW)
        lost = {rank for rank, kind in enumerate(kinds) if kind in ("silent", "failed", "absent")}
        behind = {rank for rank, kind in enumerate(kinds) if kind == "behind"}
        assert missing.ranks == (lost or (behind if len(behind) < 3 else set())) or not missing.ranks
        assert bool(missing.ranks) == bool(lost or 0 < len(behind) < 3), kinds
        for rank in missing.ranks:
            assert f"rank {rank} " in missing.message


@pytest.mark.parametrize(
    ("statuses", "silent", "message"),
    [
        (
            [make_status(0, 9, f"{FAILED}OutOfMemoryError: full")],
            set(),
            "rank 0 (host b, process 4000) failed after step 3: OutOfMemoryError: full",
        ),
        (
            [make_status(0, 10), make_status(1, 10, seconds=3)],
            set(),
            "all 2 ranks are alive and have been training after step 3 for up to 400 s, so a device or the network is "
            "stuck",
        ),
        (
            [make_status(0, 9), make_status(1, 10)],
            {0},
            "rank 0 (host b, process 4000) has sent no heartbeat for 1 s; its last known state was loading after step "
            "3; the other rank is training after step 3",
        ),
    ],
    ids=["failed", "all alive", "silent"],
)
def test_messages(statuses: list[RankStatus | None], silent: set[int], message: str) -> None:
    assert find_missing_ranks(statuses, silent, NOW).message == message


def test_the_message_for_a_thousand_ranks_is_short() -> None:
    statuses = [make_status(rank, 9 + (rank > 500)) for rank in range(1000)]
    message = find_missing_ranks(statuses, (), NOW).message
    assert message.count("process") == heartbeat.MAX_NAMED and "; and 497 more ranks" in message and len(message) < 500


def test_the_status_of_a_rank_reaches_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a real store: a rank that becomes silent, a rank that never joins, and the time spent loading."""
    monkeypatch.setattr(heartbeat, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(heartbeat, "SILENCE_SECONDS", 0.3)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    reporters = [HeartbeatReporter(rank, 3, dist.PrefixStore("a", store).clone()).start() for rank in range(2)]
    for step in range(3):
        for reporter in reporters:
            reporter.enter(step, "loading")
            reporter.enter(step, "training")
    reporters[1].enter(3, "loading")
    time.sleep(0.2)
    reporters[1].enter(3, "training")
    time.sleep(0.2)
    reporters[1].close()
    reporters[1].thread.join()
    missing = reporters[0].find_missing()
    assert missing is not None and missing.ranks == {1, 2}
    assert "rank 1 (host " in missing.message and "its last known state was training after step 3" in missing.message
    assert "rank 2 never joined" in missing.message and "the other rank is training after step 2" in missing.message
    assert reporters[0].describe_missing().startswith("Rank 2 never joined; rank 1 (host ")
    statuses = reporters[0].read_statuses()
    assert statuses[2] is None and statuses[1] is not None and 0.15 < statuses[1].loading_seconds < 2
    reporters[1].report_failure(MemoryError("no more"))
    missing = reporters[0].find_missing()
    assert missing is not None and "failed after step 3: MemoryError: no more" in missing.message
    reporters[0].close()


def test_a_single_process_has_only_its_own_status() -> None:
    reporter = HeartbeatReporter().start()
    reporter.enter(1, "loading")
    assert [status and status.stage for status in reporter.read_statuses()] == ["loading"]
    assert reporter.describe_missing() == ""


def train_with_stuck_loader(arguments: list[str]) -> None:
    """Run the trainer. Rank 1 gets no batch after two steps, and no error either."""
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
    """One rank warns after half of the timeout. After all of it, every other rank ends and names the stuck one."""
    fields = train_fields(latents, tmp_path / "run", max_steps=1000, global_batch_size=12, collective_timeout=11.0)
    program = f"{__name__}:{train_with_stuck_loader.__name__}"
    arguments = ["--config", str(write_config(tmp_path, fields))]
    first, second, third = ranks.start(tmp_path / "log", arguments, 3, program=program)
    assert ranks.wait([first, third], 120) == [1, 1], (tmp_path / "log").read_text()
    second.kill()
    second.join()
    printed = " ".join((tmp_path / "log").read_text().split())
    stuck = f"(host {os.uname().nodename}, process {second.pid}) has been loading after step 2 for "
    assert printed.count(f"warning: rank 1 {stuck}") == 1 and "The run ends once this has lasted for 11 s." in printed
    assert printed.count(f"Rank 1 {stuck}") == 2 and "; the others are training after step 2." in printed
