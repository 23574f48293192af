"""The Ray job: input shards onto workers, each retried where it fails, none able to stop the others."""

import functools
import os
import re
import signal
import time
import traceback
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import ray
import torch

from precompute.cluster.attempts import Attempts, Nodes
from precompute.cluster.nodes import Reader, Reporter, Watch, make_board
from precompute.cluster.progress import Progress
from precompute.config import PrecomputeConfig
from precompute.encode.encoders import ImageEncoder, TextEncoder
from precompute.encode.overlap import Stuck
from precompute.encode.shard import encode_shard, warm_up
from precompute.input.tars import InputShard
from shards.base.errors import DamagedInput, RequestError, WorkError, is_storage_error
from shards.base.stop import StopSignal
from shards.base.store import Store
from shards.format.encoding import EncodingRecord
from shards.format.models import hash_weights, model_folder
from shards.format.receipts import Receipt, load_receipts
from shards.open import open_store

GRACE_SECONDS = 10
# What a launcher left in the environment makes `streaming` believe that it is one of several ranks.
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
NODE_ID = "ray.io/node-id"
POLL_SECONDS = 1.0


@dataclass
class JobResult:
    """What a job did."""

    done: list[Receipt] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Shard → the last attempt's error."""
    left: list[str] = field(default_factory=list)
    """Shards that were not done when the job was told to leave."""


def choose_shards(wanted: str, available: list[InputShard]) -> list[InputShard]:
    """`00042`, `00000-00099`, commas of both, or `all` → input shards, in order, each once.

    Raises:
        RequestError: a name that cannot be read, or a tar that is not there.
    """
    if wanted == "all":
        return available
    by_name = {shard.name: shard for shard in available}
    names: list[str] = []
    for word in wanted.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", word.strip())
        if not match:
            raise RequestError(f"shards = {wanted!r}: give 00042, 00000-00099, commas of both, or `all`.")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise RequestError(f"shards = {wanted!r}: the range {word} runs backwards.")
        names += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    missing = [name for name in names if name not in by_name]
    if missing:
        listed = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise RequestError(
            f"There is no tar for shard {listed}. The input holds {available[0].name} to {available[-1].name} "
            f"({len(available)} tars)."
        )
    return [by_name[name] for name in sorted(set(names))]


def run_job(shards: list[InputShard], config: PrecomputeConfig, encoding: EncodingRecord) -> JobResult:
    """Encode `shards` on the Ray cluster that `start_ray` joined or started, until each is done or has failed.

    On SIGTERM, SIGUSR1 or SIGINT it abandons the attempts that are under way, and returns.

    Raises:
        WorkError: no node of the cluster could take a worker for `workers.wait_for_resources` seconds.
    """
    result = JobResult()
    workers, watch, nodes = config.workers, Watch(config.workers), Nodes(config.workers)
    board, submit = make_board(), worker_task(config)
    reader = Reader(board)
    waiting = deque(Attempts(shard) for shard in shards)
    running: dict[ray.ObjectRef, Attempts] = {}

    def where_to(attempts: Attempts) -> dict[str, object]:
        attempts.placed = nodes.avoid(attempts, watch.able)
        return {"label_selector": {NODE_ID: f"!in({','.join(attempts.placed)})"}} if attempts.placed else {}

    # after ray.init, which listens to SIGTERM itself
    with Progress(total=len(waiting)) as progress, StopSignal(signal.SIGINT) as stop:
        while (waiting or running) and not stop.received:
            if news := watch.look():
                progress.say(news)
            for attempts in take_due(waiting, workers.max_in_flight - len(running)):
                task = submit.options(**where_to(attempts))
                running[task.remote(attempts.shard, config, encoding, attempts.number, board)] = attempts
            finished = ray.wait(list(running), num_returns=1, timeout=POLL_SECONDS)[0] if running else []
            for reference in finished:
                attempts = running.pop(reference)
                name, number = attempts.shard.name, attempts.number
                node = reader.node_of(name, number)
                try:
                    receipt = ray.get(reference)
                except ray.exceptions.TaskCancelledError:
                    waiting.append(attempts)  # it waited for nodes that are gone
                except ray.exceptions.RayError as error:
                    again = attempts.fail(is_lost(error), node, workers) and not is_final(error)
                    progress.attempt_failed(name, attempts.last(is_lost(error), workers), explain(error))
                    if not is_final(error) and nodes.failed(node):  # a damaged tar says nothing of the node
                        progress.say(f"node {node} failed {workers.node_failures} attempts in a row, and is avoided")
                    if again:
                        waiting.append(attempts)
                    else:
                        result.failed[name] = one_line(error)
                        progress.shard_failed()
                else:
                    nodes.succeeded(node)
                    result.done.append(receipt)
                    progress.shard_done(receipt)
            for reference, attempts in running.items():
                if attempts.placed and not watch.able - set(attempts.placed):
                    ray.cancel(reference)  # every node that it may go to is gone: it would wait for ever
            at_work = {(attempts.shard.name, attempts.number) for attempts in running.values()}
            progress.tick(reader.samples_in(at_work), len(running))
            if not running and waiting:
                time.sleep(min(POLL_SECONDS, max(0.0, min(a.not_before for a in waiting) - time.monotonic())))
        result.left = [attempts.shard.name for attempts in waiting]
        result.left += abandon({task: attempts.shard for task, attempts in running.items()}, config, result)
    return result


def abandon(running: dict[ray.ObjectRef, InputShard], config: PrecomputeConfig, result: JobResult) -> list[str]:
    """Interrupt attempts and wait until they have removed their folders; end those that take too long.

    Returns:
        The shards abandoned; what was committed meanwhile goes to `result`.
    """
    for force in (False, True):
        pending = ray.wait(list(running), num_returns=len(running), timeout=0)[1] if running else []
        for reference in pending:
            ray.cancel(reference, force=force)
        if pending:
            ray.wait(pending, num_returns=len(pending), timeout=GRACE_SECONDS)
    left = []
    for reference, shard in running.items():
        try:
            result.done.append(ray.get(reference, timeout=0))
        except ray.exceptions.RayError:
            left.append(shard.name)
    return left


def take_due(waiting: deque[Attempts], room: int) -> Iterator[Attempts]:
    """Up to `room` of the attempts whose time has come, in order; they leave `waiting`."""
    for _ in range(len(waiting)):
        attempts = waiting.popleft()
        if room > 0 and attempts.not_before <= time.monotonic():
            room -= 1
            yield attempts
        else:
            waiting.append(attempts)


def is_lost(error: ray.exceptions.RayError) -> bool:
    """Whether an attempt's process or node went away; otherwise it raised."""
    return not isinstance(error, ray.exceptions.RayTaskError)


def is_final(error: ray.exceptions.RayError) -> bool:
    """Whether another attempt would find the same."""
    return isinstance(cause_of(error), DamagedInput)


def not_committed(shards: list[InputShard], config: PrecomputeConfig, store: Store) -> list[InputShard]:
    """Those whose receipt has not every configured bucket."""
    wanted = set(map(str, config.bucket_list))
    receipts = load_receipts(store, [shard.name for shard in shards])
    done = {receipt.shard for receipt in receipts if wanted <= receipt.parts.keys()}
    return [shard for shard in shards if shard.name not in done]


def worker_task(config: PrecomputeConfig) -> ray.remote_function.RemoteFunction:
    """The Ray task that encodes one shard, with the resources that the config gives a worker.

    A process is kept between tasks (Ray drops a GPU task's after each by default), and its encoders with it. Retries
    are counted by the job, not by Ray.
    """
    workers = config.workers
    return ray.remote(
        num_gpus=workers.num_gpus,
        num_cpus=workers.num_cpus,
        resources=workers.resources,
        max_retries=0,
        max_calls=0,
        scheduling_strategy="SPREAD",
    )(encode_on_worker)


def encode_on_worker(
    shard: InputShard, config: PrecomputeConfig, encoding: EncodingRecord, attempt: int, board: ray.actor.ActorHandle
) -> Receipt:
    """Runs in a Ray worker: load the encoders once per process, then encode the shard."""
    for name in RANK_VARIABLES:
        os.environ.pop(name, None)
    device = torch.device("cuda" if config.workers.num_gpus else "cpu")
    # encoders on the CPU share its cores; beside a GPU, torch scales pictures in the decoding threads, one core each
    torch.set_num_threads(1 if device.type == "cuda" else max(1, int(config.workers.num_cpus)))
    report = Reporter(board, shard.name, attempt)
    check_shared_root(config, encoding)
    models = (config.vae, config.text_encoder, config.tokenizer)
    image_encoder, text_encoder = load_encoders(models, encoding, device, config.workers.compile)
    try:
        return encode_shard(shard, config, encoding, image_encoder, text_encoder, attempt, report)
    except RuntimeError as error:
        if "CUDA error" not in str(error) and not isinstance(error, Stuck):
            raise
        # this process cannot use its GPU again, or has a thread that never ends: Ray starts another one
        traceback.print_exc()
        os._exit(1)


def check_shared_root(config: PrecomputeConfig, encoding: EncodingRecord) -> None:
    """See that this worker's `output` is the root that the driver made.

    Raises:
        WorkError: it is not.
    """
    try:
        shared = EncodingRecord.load(open_store(config.output)).id == encoding.id
    except RequestError:
        shared = False
    if not shared:
        raise WorkError(
            f"{config.output} on {os.uname().nodename} is not the latents root that the job made: the nodes do not "
            f"share this folder. Give an `output` that all of them see under one path, or an object store's address."
        )


@functools.lru_cache(maxsize=1)
def load_encoders(
    models: tuple[str, str, str], encoding: EncodingRecord, device: torch.device, compiled: bool
) -> tuple[ImageEncoder, TextEncoder]:
    """VAE and text encoder on `device`, by the names of VAE, text encoder and tokenizer; kept for the next call.

    Raises:
        WorkError: what this node has under a name is not what encoding.json recorded.
    """
    recorded = (encoding.vae, encoding.text_encoder, encoding.tokenizer)
    folders = [model_folder(name) for name in models]
    for name, folder, weights in zip(models, folders, recorded, strict=True):
        if hash_weights(name, folder).sha256 != weights.sha256:
            raise WorkError(
                f"{name} on {os.uname().nodename} ({folder}) has other content than encoding.json recorded."
            )
    vae, text_encoder, tokenizer = folders
    precision = encoding.compute_dtype
    image_encoder = ImageEncoder(vae, device, precision, encoding.image.posterior, compiled)
    encoders = image_encoder, TextEncoder(text_encoder, tokenizer, device, precision, compiled)
    warm_up()
    return encoders


def explain(error: ray.exceptions.RayError) -> str:
    """A failed attempt for a person: one line where it is an error for people, the traceback where it is a bug."""
    cause = cause_of(error)
    return one_line(error) if isinstance(cause, WorkError | RequestError) or is_storage_error(cause) else str(error)


def cause_of(error: ray.exceptions.RayError) -> BaseException | None:
    """What was raised in the task, where something was."""
    return getattr(error, "cause", None)


def one_line(error: Exception) -> str:
    """The cause of a Ray error, without the remote traceback."""
    cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) and error.cause else error
    return f"{type(cause).__name__}: {str(cause).strip().splitlines()[-1] if str(cause).strip() else '(no message)'}"
