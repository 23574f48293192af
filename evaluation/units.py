"""Units of work on Ray, until each is done: what sampling and features share."""

import os
import random
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from precompute.cluster.fleet import Done, Failed, Fleet, FleetConfig, News, UnderWay
from precompute.cluster.ray_cluster import Function, start_ray
from precompute.encode.overlap import Stuck
from shards.base.device import is_device_error
from shards.base.errors import Preempted, WorkError
from shards.base.progress import Progress

Work = TypeVar("Work")


def run_units(
    units: Sequence[tuple[str, Work]], function: Function[Work, Any], workers: FleetConfig, what: str
) -> None:
    """`function` on every unit (key, work). Starts Ray where there is anything to do.

    Raises:
        Preempted: the job was told to leave before its end.
        WorkError: some units failed, or no node of the cluster can take a worker.
    """
    if not units:
        return
    start_ray(workers)
    failed: dict[str, str] = {}
    done = 0
    with Progress(what, "parts", len(units)) as progress:
        # in an order of its own: two jobs at once on the same parts then share them, but for those under way
        for event in Fleet(workers, function, iter(random.sample(units, len(units)))):
            match event:
                case Done():
                    done += 1
                case Failed(key=key, which=which, failure=failure, again=again):
                    progress.say(f"{what} {key}: {which}: {failure.text}")
                    if not again:
                        failed[key] = failure.line
                case News(text=text):
                    progress.say(text)
                case UnderWay(attempts=attempts, reported=reported):
                    if progress.is_due:
                        figures = {"done": done, "parts": len(units), "under_way": attempts, "pictures": reported}
                        progress.show(done + len(failed), f"{reported} pictures under way", figures)
    if failed:
        reasons = "; ".join(f"{key}: {reason}" for key, reason in sorted(failed.items()))
        raise WorkError(
            f"{what}: {len(failed)} of {len(units)} parts failed ({reasons}). The others are committed; the same "
            f"command again tries just these."
        )
    if done < len(units):
        raise Preempted(f"{what}: told to leave, {len(units) - done} parts before the end. The same command goes on.")


@contextmanager
def ending_broken_processes() -> Iterator[None]:
    """End the process after an error that it cannot recover from, so that Ray starts a new one.

    After a device error it cannot use its GPU again; after `Stuck` it has a thread that never ends.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_device_error(error) and not isinstance(error, Stuck):
            raise
        traceback.print_exc()
        os._exit(1)
