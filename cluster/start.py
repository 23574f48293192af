"""Join or start a Ray cluster, and resolve a precision for its workers' device."""

import atexit
import logging
import os
import signal
import sys
from typing import Any

import ray

from cluster.nodes import ResourcesConfig, describe, places
from shards.base.device import (
    Precision,
    PrecisionOption,
    available_cores,
    choose_device,
    is_accelerator,
    resolve_precision,
    worker_device,
)
from shards.base.errors import Preempted, RequestError, WorkError, say
from shards.base.stop import STOP_SIGNALS, exit_on_stop_signal

WORKER_START_SECONDS = 300.0
"""Seconds allowed for starting a worker's process on a node, importing torch and trying a precision."""
STOPPED = "Stopped by a signal. Committed work is kept. Run the same command again to continue."
# With a launcher's variables in the environment, libraries treat this process as one of several ranks.
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def start_ray(config: ResourcesConfig) -> None:
    """Join the cluster at RAY_ADDRESS, or start one on this machine that accepts no outside connections.

    From then on, stop signals end this process with exit code 75, except while a fleet handles them. They are ignored
    once the interpreter exits.

    Raises:
        RequestError: the cluster cannot be joined, this machine lacks the resources for one worker, or torch cannot
            use its GPU.
        WorkError: Ray does not start on this machine.
    """
    forget_ranks()
    if ray.is_initialized():
        return
    if address := os.environ.get("RAY_ADDRESS"):
        try:
            _init()
        except (ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError) as error:
            raise RequestError(
                f"The Ray cluster at RAY_ADDRESS={address} cannot be joined: {first_line(error)} This machine must be "
                f"one of its nodes; from any other machine, submit the job with `ray job submit`. If the nodes were "
                f"started with a token, set RAY_AUTH_MODE=token on this machine and put the same token in "
                f"~/.ray/auth_token or at RAY_AUTH_TOKEN_PATH (see docs/how-to/cluster.md)."
            ) from error
        return
    if config.num_gpus:
        choose_device()  # raises an error if this machine has a GPU that torch cannot use
    cores = available_cores()
    try:
        _init(
            address="local",  # otherwise Ray joins any cluster that runs on this machine
            **({"num_cpus": cores} if cores < (os.cpu_count() or 1) else {}),  # Ray ignores CPU affinity
            include_dashboard=False,
            object_store_memory=256 << 20,  # small, because units are passed by name and results are small
        )
    except Exception as error:  # after a timeout Ray raises a plain Exception
        raise WorkError(
            f"Ray did not start on this machine: {first_line(error)} Likely causes are a busy machine, too "
            f"little memory, or too little space in /tmp. Ray's logs are in /tmp/ray/session_latest/logs. Run the same "
            f"command again."
        ) from error
    here = ray.cluster_resources()
    if not min(places(here, config.needs).values()):
        raise RequestError(
            f"One worker needs {describe(config.needs)}, but this machine has {describe(here, config.needs)}. Lower "
            f"workers.num_gpus (0 encodes on the CPU), workers.num_cpus or workers.resources, or join a cluster with "
            f"RAY_ADDRESS."
        )


def precision_on_worker(requested: PrecisionOption, config: ResourcesConfig) -> Precision:
    """Resolve the requested precision for the workers' device, either on this machine or in a task on the cluster.

    An explicit precision is returned unchanged. A warning is printed if the workers run on a CPU that emulates it.

    Raises:
        RequestError, WorkError: see `start_ray`; RequestError also if torch on the worker cannot use its GPU, and
            WorkError if no node in the cluster could run the task.
    """
    if not config.num_gpus and not os.environ.get("RAY_ADDRESS"):
        return resolve_precision(requested, "cpu")
    if requested == "float32" or (config.num_gpus and requested != "auto"):
        return requested
    start_ray(config)
    task = ray.remote(num_gpus=config.num_gpus, num_cpus=config.num_cpus, resources=config.resources)(_resolve)
    seconds = config.wait_for_resources + WORKER_START_SECONDS
    try:
        precision, lines = ray.get(task.remote(requested, worker_device(config.num_gpus)), timeout=seconds)
    except ray.exceptions.GetTimeoutError as error:
        raise WorkError(
            f"The precision {requested} must be resolved on a worker, but no node in the cluster could take and "
            f"start a worker that needs {describe(config.needs)} within {seconds:g} s (workers.wait_for_resources and "
            f"{WORKER_START_SECONDS:g} s). Add such a node, or set the precision explicitly: `--precision bfloat16`."
        ) from error
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, RequestError):
            raise error.cause from None  # without Ray's traceback
        raise
    except ray.exceptions.RayError as error:
        raise WorkError(
            f"The precision {requested} must be resolved on a worker, but that worker failed: {first_line(error)} Run "
            f"the same command again, or set the precision explicitly: `--precision bfloat16`."
        ) from error
    for line in lines:
        print(line, file=sys.stderr, flush=True)
    return precision


def _resolve(requested: PrecisionOption, device: str) -> tuple[Precision, list[str]]:
    forget_ranks()
    if is_accelerator(device):  # if torch could not use the GPU, `auto` would be float32
        try:
            choose_device()
        except RequestError as error:
            raise RequestError(f"Node {ray.util.get_node_ip_address()}: {error}") from None
    lines: list[str] = []
    return resolve_precision(requested, device, lines.append), lines


def _init(**options: Any) -> None:
    """Call `ray.init`. If SIGTERM arrives during the call, print a message, because Ray's own handler exits without
    one. The processes that Ray starts inherit a blocked SIGHUP, so that they outlive a closed terminal until this one
    ends."""
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
    except SystemExit:
        say(Preempted(STOPPED))
        sys.exit(Preempted.exit_code)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
    exit_on_stop_signal(STOPPED)
    atexit.unregister(_ignore_stop_signals)  # if Ray has been started before
    atexit.register(_ignore_stop_signals)


def _ignore_stop_signals() -> None:
    """Let Ray's exit handler, which runs after this one, complete. If a signal's handler raised SystemExit in it, Ray's
    threads would crash the process at its very end, although its work is done."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def forget_ranks() -> None:
    """Remove from this process's environment the rank variables that a launcher such as torchrun sets."""
    for name in RANK_VARIABLES:
        os.environ.pop(name, None)


def first_line(error: Exception) -> str:
    """Return the first line of an error, or its type if it has no message."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else f"{type(error).__name__}."
