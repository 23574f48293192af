"""Workers as Ray has them: several attempts in one process, which is lost with all of them, and told to leave."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from precompute.cluster.fleet import Done, Failed, Fleet, FleetConfig, UnderWay
from precompute.cluster.ray_cluster import Function, start_ray

AT_ONCE = 3
CONFIG = FleetConfig(num_gpus=0, num_cpus=1, backoff=0)


@pytest.fixture(scope="module")
def one_slot() -> Iterator[None]:
    """A Ray of this machine's with room for one worker."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        init = ray.init
        patch.setattr("ray.init", lambda *args, **options: init(*args, num_cpus=1, **options))
        start_ray(CONFIG)
    yield
    ray.shutdown()


def fleet(function: Function[str, int], keys: str) -> Fleet[str, int]:
    return Fleet(CONFIG, function, ((key, key) for key in keys), AT_ONCE)


def test_a_worker_has_several_in_hand_and_is_lost_with_them(one_slot: None, tmp_path: Path) -> None:
    def meet(key: str, number: int, report: object) -> int:
        """Three of them meet in one process; one then ends it, once, and one raises, once."""
        import precompute.encode.overlap as of_process  # any module's namespace is the process's

        lock = of_process.__dict__.setdefault("_barrier", threading.Barrier(3))
        if number == 1:
            lock.wait(100)
        if key == "c" and number == 1:
            os._exit(1)
        time.sleep(0.5)  # the others are lost with it
        if key == "b" and number == 2:
            raise ValueError("b fails")
        return os.getpid()

    events = list(fleet(meet, "abc"))
    failed = [event for event in events if isinstance(event, Failed)]
    assert sorted(event.key for event in failed if event.failure.is_lost) == ["a", "b", "c"]
    assert all(event.which == "an attempt was lost (1 of 10)" for event in failed if event.failure.is_lost)
    (raised,) = (event for event in failed if not event.failure.is_lost)
    assert (raised.key, raised.which, raised.failure.line) == ("b", "attempt 1 of 3 failed", "ValueError: b fails")
    done = [event for event in events if isinstance(event, Done)]
    assert sorted(event.key for event in done) == ["a", "b", "c"] and len({event.result for event in done}) == 1
    assert raised.node == done[0].node and raised.node is not None
    log = Path(raised.log).read_text()
    assert "b: attempt 2 begins" in log and "b: attempt 2 failed: ValueError: b fails" in log
    assert "b: attempt 3 is done" in log


def test_told_to_leave_each_gives_up_at_its_next_report_and_tidies_up(one_slot: None, tmp_path: Path) -> None:
    place = str(tmp_path)

    def work(key: str, number: int, report: object) -> int:
        mine = Path(place) / key
        mine.touch()
        try:
            while True:
                time.sleep(0.02)
                report(1)  # type: ignore[operator]
        finally:
            mine.rename(mine.with_suffix(".left"))

    events = []
    for event in fleet(work, "abcd"):
        events.append(event)
        if isinstance(event, UnderWay) and len(list(tmp_path.iterdir())) == AT_ONCE:
            os.kill(os.getpid(), signal.SIGTERM)
    assert not [event for event in events if isinstance(event, Done | Failed)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.left", "b.left", "c.left"]
