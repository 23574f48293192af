"""Two Ray nodes on this machine whose processes can be killed, and the command that runs on them."""

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest.mock import patch

import psutil
from ray._private import services
from ray._private.node import Node
from ray.cluster_utils import Cluster

from tests.runs import environment

START_SECONDS = 300
"""Time that a node may take to start. Ray allows half a minute, which a busy machine can exceed."""

SAME = {"object_store_memory": 80 << 20}
POLL_SECONDS = 0.02


NO_TOKEN = {"RAY_AUTH_MODE": "disabled"}
"""Settings of nodes and drivers. An earlier `ray.init` in this process has set RAY_AUTH_MODE=token, so that nodes would
require a token that drivers would not send."""


@contextmanager
def starting() -> Iterator[None]:
    """Start nodes within the context without tokens, and let Ray wait longer for them."""

    def get_node(*args: Any, **named: Any) -> Any:
        until = time.monotonic() + START_SECONDS
        while True:
            try:
                return ask_once(*args, **named)
            except RuntimeError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)

    ask_once = services.get_node
    with patch("ray._private.services.get_node", get_node), patch.dict(os.environ, NO_TOKEN):
        yield


class TwoNodes:
    """A head node that runs no tasks, which drivers connect to, and a node with room for one worker."""

    def __init__(self, folder: Path):
        head = {"num_cpus": 0, "include_dashboard": False, "temp_dir": str(folder)}
        # otherwise every ray.init on this machine without an address would join this cluster
        with patch("ray._private.utils.write_ray_address"), starting():
            self.cluster = Cluster(initialize_head=True, head_node_args=head | SAME)
        self.node = self.add_node()

    def add_node(self) -> Node:
        """Add a node with room for one worker."""
        with starting():
            return self.cluster.add_node(num_cpus=1, **SAME)

    def __enter__(self) -> "TwoNodes":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with patch("ray._common.utils.reset_ray_address"):
            self.cluster.shutdown()

    def workers(self) -> list[psutil.Process]:
        """Return the node's worker processes, busy or idle."""
        return workers_of(self.node)

    def kill_raylet(self) -> None:
        """Kill the node's raylet with SIGKILL, and start a new node."""
        self.lose(self.node)
        self.node = self.add_node()

    def lose(self, node: Node) -> None:
        """Kill the node's raylet with SIGKILL, without a replacement."""
        raylet_of(node).kill()
        self.cluster.remove_node(node, allow_graceful=False)

    def start_driver(self, words: list[str], log: Path) -> subprocess.Popen[bytes]:
        """Start `python -m WORDS` on this cluster."""
        with log.open("ab") as file:
            return subprocess.Popen(
                [sys.executable, "-m", *words],
                stdout=file,
                stderr=file,
                env=environment(RAY_ADDRESS=self.cluster.address, **NO_TOKEN),
            )


def raylet_of(node: Node) -> psutil.Process:
    """Return the raylet of a node that runs tasks."""
    return psutil.Process(node.all_processes["raylet"][0].process.pid)


def workers_of(node: Node, title: str = "ray::WorkerActor") -> list[psutil.Process]:
    """Return a node's worker processes, busy or idle; `ray::WorkerActor.attempt` selects those with an attempt."""
    found = []
    for process in raylet_of(node).children():
        try:
            is_one = " ".join(process.cmdline()[:1]).startswith(title)
        except psutil.Error:
            continue
        if is_one:
            found.append(process)
    return found


def wait_for_a_moment(
    rng: random.Random, attempts: Callable[[], list[Path]], driver: subprocess.Popen[bytes], longest: float, work: float
) -> bool:
    """Wait for a random time, in half of the calls after first waiting for an attempt to start; return False if the
    driver ended first.

    Args:
        attempts: returns the folders of running attempts.
        longest: maximum wait in seconds from now.
        work: maximum wait in seconds after an attempt started; shorter jobs mostly end before.
    """
    at_work, left = rng.random() < 0.5, set(attempts())  # folders left by a killed job do not belong to this job
    while at_work and left.issuperset(attempts()):
        if driver.poll() is not None:
            return False
        time.sleep(POLL_SECONDS)
    until = time.monotonic() + rng.uniform(0, work if at_work else longest)
    while time.monotonic() < until:
        if driver.poll() is not None:
            return False
        time.sleep(POLL_SECONDS)
    return driver.poll() is None
