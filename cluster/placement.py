"""Placement of units on workers, and the number of workers to request. Pure logic, without Ray."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from cluster.retry import Unit

Avoided = Callable[[Unit[Any]], frozenset[str]]
"""Function from a unit to the nodes that it must not run on."""


@dataclass(eq=False)
class Worker:
    """A worker process, which runs one or more units at a time."""

    actor: Any
    """Handle of the Ray actor."""
    started: Any
    """Object reference that resolves to the id of the worker's node and the path of its log once its process runs, or
    to an error if the process cannot start."""
    requested_at: float = 0.0
    """Time of the request for the worker, by `time.monotonic`."""
    node: str | None = None
    """Id of the worker's node; None until its process runs."""
    log: str = ""
    """Path of the worker's log on the node."""
    running: list[Unit[Any]] = field(default_factory=list)

    def has_slot(self, at_once: int) -> bool:
        """Return whether the worker, which runs at most `at_once` units, can take one more."""
        return len(self.running) < at_once and not any(unit.runs_alone for unit in self.running)


def assign(
    units: list[Unit[Any]], workers: list[Worker], at_once: int, places: int, avoided: Avoided
) -> Iterator[tuple[Unit[Any], Worker]]:
    """Assign each unit, in order, to the suitable worker with the fewest units, and yield the (unit, worker) pairs.
    Each unit is added to its worker's `running` list.

    A worker gets a second unit only if enough units remain for the workers that are still starting and fit on the
    cluster's `places`. Otherwise, the first worker to start would take units that the other workers could run a moment
    later.
    """
    started = [worker for worker in workers if worker.node is not None]
    starting = min(len(workers), places) - len(started)
    free = [worker for worker in started if worker.has_slot(at_once)]
    waiting = len(units)
    for unit in units:
        if not free:
            return
        may_share = waiting > starting and not unit.runs_alone
        nodes = avoided(unit)
        candidates = [worker for worker in free if worker.node not in nodes and (may_share or not worker.running)]
        if not candidates:
            continue
        worker = min(candidates, key=lambda worker: len(worker.running))
        worker.running.append(unit)
        waiting -= 1
        if not worker.has_slot(at_once):
            free.remove(worker)
        yield unit, worker


def missing_workers(
    units: list[Unit[Any]], num_running: int, workers: list[Worker], most: int, avoided: Avoided
) -> list[frozenset[str]]:
    """Return the workers to request, each as the set of nodes that it must avoid. They bring the total to at most
    `most`.

    If no worker is missing, one more may be requested, even beyond `most`, for a unit that must avoid the nodes of all
    current workers.
    """
    missing = min(len(units) + num_running, most) - len(workers)
    if missing > 0:
        return [frozenset()] * missing
    nodes = [worker.node for worker in workers]
    if not nodes or None in nodes:  # a worker that is still starting may suit the unit
        return []
    return next(([avoided(unit)] for unit in units if avoided(unit).issuperset(nodes)), [])


def surplus_workers(units: list[Unit[Any]], num_running: int, workers: list[Worker], avoided: Avoided) -> list[Worker]:
    """Return the workers that have not started and are no longer needed by any unit."""
    surplus = len(workers) - len(units) - num_running
    if surplus <= 0:
        return []
    starting = [worker for worker in workers if worker.node is None]
    nodes = {worker.node for worker in workers if worker.node is not None}
    # the most recently requested worker is for a unit that must avoid the nodes of all workers already started
    is_reserved = bool(nodes) and any(avoided(unit) >= nodes for unit in units)
    return starting[: max(0, min(surplus, len(starting) - is_reserved))]
