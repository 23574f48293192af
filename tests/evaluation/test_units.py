"""Jobs of one context share their workers, and a worker keeps the models of one kind of unit only."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from cluster.fleet import Done, FleetConfig
from evaluation.units import keep_last, run_on_worker, run_units, workers_kept

CONFIG = FleetConfig(num_gpus=0, num_cpus=1)


def test_jobs_share_a_pool_that_is_drained_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pools: list[Any] = []
    used: list[Any] = []

    class Pool:
        def __init__(self, config: FleetConfig):
            self.drained = 0
            pools.append(self)

        def drain(self) -> None:
            self.drained += 1

    def fleet(config: object, function: object, units: Iterator[tuple[str, str]], pool: Any) -> Iterator[Done[None]]:
        used.append(pool)
        return (Done(key, None, None) for key, _ in units)

    monkeypatch.setattr("evaluation.units.start_ray", lambda workers: None)
    monkeypatch.setattr("evaluation.units.WorkerPool", Pool)
    monkeypatch.setattr("evaluation.units.Fleet", fleet)

    def job() -> None:
        with workers_kept():
            run_units([("a", "a")], print, CONFIG, "test")

    with workers_kept():
        job()
        job()
        assert used == 2 * pools and len(pools) == 1 and not pools[0].drained
    assert pools[0].drained == 1
    run_units([("a", "a")], print, CONFIG, "test")
    assert used[2] is None and len(pools) == 1


def test_models_are_dropped_when_the_kind_of_unit_changes() -> None:
    loads: list[str] = []
    load = keep_last(loads.append)

    def first(model: str, work: str, attempt: int, report: object) -> None:
        load(model)

    def second(model: str, work: str, attempt: int, report: object) -> None:
        load(model)

    for function in (first, first, second, first):
        run_on_worker(partial(function, "model"), CONFIG, "work", 1, lambda done: None)
    assert len(loads) == 3
