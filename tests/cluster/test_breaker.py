"""Outages of storage, credentials and models during a job, in simulated time on a scripted pool."""

import json
import os
import resource
import signal
import traceback
from collections import Counter
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import ray

from cluster.failure_log import FailureLog, summarize
from cluster.fleet import Done, Failed, Fleet, News
from cluster.nodes import Resources
from cluster.pool import Failure, RunningAttempt, StartFailure, describe_failure
from precompute.encode.worker import _recorded
from shards.base.errors import Outage, UnfitNode, WorkError
from shards.base.remote import RemoteStore, store_errors
from shards.format.towers import Weights
from tests.cluster.played import Clock, Outcome, TimedPool, make_fleet, without_state
from tests.forks import OK, fork, wait_for

KEYS = [f"{number:05d}" for number in range(60)]


def raised(error: Exception) -> Failure:
    """Return the failure that the fleet sees when a worker raises."""
    try:
        raise error
    except type(error):
        return describe_failure(ray.exceptions.RayTaskError("attempt", traceback.format_exc(), error))


def stored(error: Exception) -> Failure:
    """Return the failure that the fleet sees when a store's client raises."""
    try:
        with store_errors("s3://bucket/tars/00007.tar", FileNotFoundError):
            raise error
    except Outage as outage:
        return raised(outage)


SLOW_DOWN = stored(OSError(5, "Please reduce your request rate. (503 SlowDown)"))
EXPIRED = stored(PermissionError("The provided token has expired."))
DISK = raised(OSError(28, "No space left on device"))
CANNOT_START = Failure(True, False, "ActorDiedError: ModuleNotFoundError: No module named 'cluster'", "a traceback")


def missing_model() -> Failure:
    """Return the failure of a worker that lacks a model."""
    with pytest.raises(UnfitNode, match="neither an existing folder nor a hub name") as caught:
        _recorded(Weights(name="absent", sha256="0" * 64))
    return raised(caught.value)


class PartlyBrokenPool(TimedPool):
    """Workers on `nodes`, and on further nodes of the cluster, where each start of a worker fails."""

    def __init__(self, clock: Clock, nodes: dict[str, int], num_broken: int, seconds: float):
        super().__init__(clock, nodes, lambda *_: (seconds, "ok"))
        self.broken: dict[str, Resources] = {f"broken{number}": {"CPU": 1.0} for number in range(num_broken)}

    def alive(self) -> dict[str, Resources]:
        return super().alive() | self.broken

    def wait(self, seconds: float) -> list[RunningAttempt[str] | StartFailure]:
        events = super().wait(seconds)
        starting = [worker for worker in self.workers if worker.node is None]
        if events or not starting:
            return events
        self.dismiss(starting[0])
        return [StartFailure(starting[0].requested_at, replace(CANNOT_START))]


@pytest.mark.parametrize(
    ("outage", "of_output"),
    [(SLOW_DOWN, True), (EXPIRED, True), (EXPIRED, False), (DISK, True)],
    ids=["503", "expired credentials", "of the input alone", "full disk"],
)
def test_five_minutes_of_an_outage_cost_nothing(
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    outage: Failure,
    of_output: bool,
) -> None:
    begin, end = clock.now + 70, clock.now + 370

    def act(key: str, node: str, now: float) -> tuple[float, Outcome]:
        if begin <= now < end:
            return 1, outage  # the tar cannot be fetched …
        return 20, outage if of_output and begin <= now + 20 < end else "ok"  # … or not be committed

    pool = TimedPool(clock, {"a": 4, "b": 4}, act)
    events = without_state(make_fleet(monkeypatch, pool, KEYS, backoff=5, attempts=1, lost_attempts=1))
    assert sorted(event.key for event in events if isinstance(event, Done)) == KEYS
    failed = [event for event in events if isinstance(event, Failed)]
    assert failed and all(event.again and event.number == 1 for event in failed)
    assert {event.which for event in failed} == {"an attempt failed because of an outage and is not counted"}
    said = [event.text for event in events if isinstance(event, News)]
    assert "The job has been paused for 0 s and will retry in 5 s: " in said[0]
    assert "The outage is over. The job is resuming after a pause of" in said[-1]
    assert len(said) == 7  # after 0, 5, 15, 35, 75 and 155 s, and the end
    probes = [event for event in failed if event.key in {f.key for f in failed[-5:]}]
    assert len({event.key for event in probes}) >= 5, "each probe takes a different tar"
    print(
        f"{request.node.callspec.id}: {len(KEYS)} tars on 8 slots done after {clock.now - 1000:.0f} s, {len(failed)} "
        f"attempts met the outage, {len(said)} lines said"
    )
    # eight slots, 20 s a tar, and the outage; the last probe's wait (160 s) is the longest idle time
    assert clock.now - 1000 <= 300 + 160 + 20 * (len(KEYS) / 8 + 3)


def test_a_missing_model_stops_the_job_within_a_minute(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = missing_model()
    pool = TimedPool(clock, {"a": 8, "b": 8}, lambda *_: (1, lacking))
    fleet: Fleet[str, str] = make_fleet(monkeypatch, pool, KEYS, backoff=5)
    with pytest.raises(
        WorkError,
        match=r"(?s)4 consecutive attempts \(at .*\) failed because of an outage.*The model absent is neither",
    ) as caught:
        without_state(fleet)
    print(f"a missing model: stopped after {clock.now - 1000:.0f} s")
    assert clock.now - 1000 < 60
    assert len(str(caught.value).split("(")[1].split(")")[0].split(", ")) == 4, "distinct tars"
    assert f"On node {os.uname().nodename}: " in str(caught.value) and "run the same command again" in str(caught.value)


def test_an_outage_without_an_end_stops_the_job(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = TimedPool(clock, {"a": 8}, lambda *_: (1, EXPIRED))
    with pytest.raises(WorkError, match=r"16 consecutive attempts .* token has expired"):
        without_state(make_fleet(monkeypatch, pool, KEYS, backoff=5))
    print(f"an outage without an end: stopped after {clock.now - 1000:.0f} s")
    assert 45 * 60 < clock.now - 1000 < 70 * 60


@pytest.mark.parametrize("num_nodes", [1, 2, 3])
def test_a_job_stops_if_no_worker_can_start(clock: Clock, monkeypatch: pytest.MonkeyPatch, num_nodes: int) -> None:
    """Such as on nodes without the package."""
    pool = PartlyBrokenPool(clock, {}, num_nodes, 20)
    with pytest.raises(WorkError, match=r"16 consecutive attempts .* a worker could not start: .* No module named"):
        for _ in make_fleet(monkeypatch, pool, KEYS, backoff=5):
            assert clock.now - 1000 < 2 * 3600
    assert 45 * 60 < clock.now - 1000 < 70 * 60


def test_a_node_where_no_worker_can_start_costs_no_attempts(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = PartlyBrokenPool(clock, {"a": 1}, 1, 20)
    events = without_state(make_fleet(monkeypatch, pool, KEYS, backoff=5, lost_attempts=1))
    assert sorted(event.key for event in events if isinstance(event, Done)) == KEYS
    failed = [event for event in events if isinstance(event, Failed)]
    assert failed and all(event.again and event.number == 1 for event in failed)
    assert not any(isinstance(event, News) for event in events), "the job does not pause"


@pytest.mark.parametrize("by", ["attempt", "node"])
def test_alternating_causes_stop_the_job_like_a_single_cause(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """A change of cause must not restart the count, or the job would stay paused forever."""
    lacking, number = missing_model(), count()

    def act(key: str, node: str, now: float) -> tuple[float, Outcome]:
        return 1, SLOW_DOWN if (next(number) % 2 if by == "attempt" else node == "a") else lacking

    pool = TimedPool(clock, {"a": 2, "b": 2}, act)
    many = [f"{number:05d}" for number in range(2000)]
    with pytest.raises(WorkError, match=r"(4|16) consecutive attempts .* failed because of an outage"):
        for _ in make_fleet(monkeypatch, pool, many, backoff=5, lost_attempts=10**6):
            assert clock.now - 1000 < 2 * 3600
    assert len(pool.begun) < 60


def test_units_leave_a_node_that_lacks_a_model(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = missing_model()
    pool = TimedPool(
        clock, {"a": 2, "b": 2, "c": 2}, lambda key, node, now: (1, lacking) if node == "a" else (20, "ok")
    )
    events = without_state(make_fleet(monkeypatch, pool, KEYS, backoff=5, max_in_flight=12))
    assert sorted(event.key for event in events if isinstance(event, Done)) == KEYS
    assert next(event.text for event in events if isinstance(event, News)) == (
        "5 attempts in a row failed on node a, so the job will prefer other nodes for ten minutes"
    )
    assert not any("been paused" in event.text for event in events if isinstance(event, News))
    assert all(event.again for event in events if isinstance(event, Failed))
    assert Counter(node for _, _, node in pool.begun)["a"] < 20


def test_an_outage_of_a_single_unit_is_counted(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as an object that nobody may read."""
    pool = TimedPool(clock, {"a": 2, "b": 2}, lambda key, node, now: (1, EXPIRED) if key == "00007" else (20, "ok"))
    events = without_state(make_fleet(monkeypatch, pool, KEYS * 2, backoff=1, lost_attempts=3))
    last = [event for event in events if isinstance(event, Failed)][-1]
    assert (last.key, last.again, last.which) == ("00007", False, "an attempt was lost (3 of 3 allowed)")
    assert len({event.key for event in events if isinstance(event, Done)}) == len(KEYS) - 1


def test_cluster_errors_are_outages_and_lost_workers_are_not() -> None:
    assert describe_failure(ray.exceptions.RuntimeEnvSetupError("pip failed")).outage is not None
    assert not describe_failure(ray.exceptions.RuntimeEnvSetupError("pip failed")).is_lost
    lost = describe_failure(ray.exceptions.WorkerCrashedError())
    assert lost.is_lost and lost.outage is None
    assert raised(ValueError("a bug")).outage is None and raised(WorkError("damaged")).outage is None


def failed(key: str, outcome: Failure, again: bool = True) -> Failed:
    return Failed(key, "a", "attempt 1 of 3 failed", outcome, again)


def test_failures_are_written_beside_a_folder(tmp_path: Path) -> None:
    for job in range(2):
        with FailureLog(tmp_path / "root") as log:
            log.record(failed(f"0000{job}", raised(ValueError("a bug")), again=False))
            log.record(failed("00009", SLOW_DOWN))
    lines = [json.loads(line) for line in (tmp_path / "root.failures.jsonl").read_text().splitlines()]
    assert [(line["shard"], line["node"], line["attempts"], line["final"]) for line in lines] == [
        ("00000", "a", 1, True),
        ("00009", "a", 1, False),
        ("00001", "a", 1, True),
        ("00009", "a", 1, False),
    ]
    assert lines[0]["cause"] == "ValueError: a bug" and "raise error" in lines[0]["trace"]
    assert "503 SlowDown" in lines[1]["cause"]


def test_a_line_that_does_not_fit_on_the_disk_is_not_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fill_the_disk() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with FailureLog(tmp_path / "root") as log:
            log.record(failed("00000", raised(ValueError("a bug"))))
            size = log.file.stat().st_size if log.file else 0
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, resource.RLIM_INFINITY))
            log.record(failed("00001", raised(ValueError("a bug"))))
            assert log.unwritten
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            log.record(failed("00002", raised(ValueError("a bug"))))

    assert wait_for(fork(fill_the_disk)) == OK
    lines = [json.loads(line)["shard"] for line in (tmp_path / "root.failures.jsonl").read_text().splitlines()]
    assert lines == ["00000", "00001", "00002"]


def test_failures_of_a_root_that_is_a_bucket_are_written_into_it(s3: str) -> None:
    with FailureLog(s3) as log:
        log.record(failed("00000", raised(ValueError("a bug"))))
        assert log.where == f"{s3}/.failures"
    (name,) = RemoteStore(s3).files()
    assert name.startswith(".failures/") and json.loads(RemoteStore(s3).read(name))["shard"] == "00000"


def test_failures_are_kept_while_their_store_is_unavailable(
    s3: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*arguments: object) -> bool:
        raise Outage("no route")

    def lines(store: RemoteStore) -> list[str]:
        return [json.loads(line)["shard"] for name in store.files() for line in store.read(name).splitlines()]

    create = RemoteStore.create
    with FailureLog(f"{s3}/root") as log:
        monkeypatch.setattr(RemoteStore, "create", refuse)
        log.record(failed("00000", raised(ValueError("a bug"))))
        monkeypatch.setattr(RemoteStore, "create", create)
        log.record(failed("00001", SLOW_DOWN))
        assert lines(RemoteStore(f"{s3}/root.failures")) == []
        log.record(failed("00002", raised(ValueError("a bug"))))
        assert lines(RemoteStore(f"{s3}/root.failures")) == ["00000", "00001", "00002"]
        monkeypatch.setattr(RemoteStore, "create", refuse)
        log.record(failed("00003", SLOW_DOWN))
    said = capsys.readouterr().err
    assert (
        "root.failures cannot be written (no route). These lines are missing from it:" in said
        and '"shard": "00003"' in said
    )


def test_a_long_list_of_failures_is_shortened() -> None:
    assert summarize([("b", "y"), ("a", "x")]) == "a: x; b: y"
    assert summarize([(str(i), "x") for i in range(7)]) == "0: x; 1: x; 2: x; 3: x; 4: x; and 2 more"
