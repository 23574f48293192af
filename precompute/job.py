"""The Ray job: input shards onto workers, each retried where it fails, none able to stop the others."""

import functools
import logging
import os
import re
import traceback
from collections import deque
from dataclasses import dataclass, field

import ray
import torch

from precompute.config import PrecomputeConfig
from precompute.encoders import ImageEncoder, TextEncoder
from precompute.progress import Progress
from precompute.shard import encode_shard, warm_up
from precompute.tars import InputShard
from shards.encoding import FILE_NAME, EncodingRecord
from shards.errors import RequestError, WorkError
from shards.models import hash_weights, model_folder
from shards.receipts import Receipt, load_receipt

# What a launcher left in the environment makes `streaming` believe that it is one of several ranks.
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class JobResult:
    """What a job did."""

    done: list[Receipt] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Shard → the last attempt's error."""


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
    """Encode `shards` on the Ray cluster that `start_ray` joined or started, until each is done or has failed."""
    result = JobResult()
    waiting = deque((shard, 1) for shard in shards)
    submit = worker_task(config)
    running: dict[ray.ObjectRef, tuple[InputShard, int]] = {}
    with Progress(total=len(waiting)) as progress:
        while waiting or running:
            while waiting and len(running) < config.workers.max_in_flight:
                shard, attempt = waiting.popleft()
                running[submit.remote(shard, config, encoding, attempt)] = (shard, attempt)
            finished, _ = ray.wait(list(running), num_returns=1, timeout=1.0)
            for reference in finished:
                shard, attempt = running.pop(reference)
                try:
                    receipt = ray.get(reference)
                except ray.exceptions.RayError as error:
                    reason = one_line(error)
                    progress.attempt_failed(shard.name, attempt, config.workers.attempts, explain(error))
                    if attempt < config.workers.attempts:
                        waiting.append((shard, attempt + 1))
                    else:
                        result.failed[shard.name] = reason
                        progress.shard_failed()
                else:
                    result.done.append(receipt)
                    progress.shard_done(receipt)
    return result


def is_committed(shard: InputShard, config: PrecomputeConfig) -> bool:
    """Whether the shard's receipt has every configured bucket."""
    receipt = load_receipt(config.output, shard.name)
    return receipt is not None and set(config.buckets) <= set(receipt.parts)


def start_ray(config: PrecomputeConfig) -> None:
    """Join the cluster at RAY_ADDRESS, or start one on this machine that listens to nobody else.

    Raises:
        RequestError: this machine has not what one worker takes, so that no shard would ever start.
    """
    for name in RANK_VARIABLES:
        os.environ.pop(name, None)
    if ray.is_initialized():
        return
    if os.environ.get("RAY_ADDRESS"):
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
        return
    ray.init(
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=256 << 20,  # shards go by name; only receipts come back
    )
    here, workers = ray.cluster_resources(), config.workers
    if here.get("GPU", 0) < workers.num_gpus or here.get("CPU", 0) < workers.num_cpus:
        raise RequestError(
            f"One worker takes {workers.num_gpus:g} GPUs and {workers.num_cpus:g} CPUs; this machine has "
            f"{here.get('GPU', 0):g} and {here.get('CPU', 0):g}. Set workers.num_gpus (0 encodes on the CPU) and "
            f"workers.num_cpus, or join a cluster with RAY_ADDRESS."
        )


def worker_task(config: PrecomputeConfig) -> ray.remote_function.RemoteFunction:
    """The Ray task that encodes one shard, with the resources that the config gives a worker.

    A process is kept between tasks (Ray drops a GPU task's after each by default), and its encoders with it. Retries
    are counted by the job, not by Ray.
    """
    workers = config.workers
    return ray.remote(
        num_gpus=workers.num_gpus, num_cpus=workers.num_cpus, max_retries=0, max_calls=0, scheduling_strategy="SPREAD"
    )(encode_on_worker)


def encode_on_worker(shard: InputShard, config: PrecomputeConfig, encoding: EncodingRecord, attempt: int) -> Receipt:
    """Runs in a Ray worker: load the encoders once per process, then encode the shard."""
    for name in RANK_VARIABLES:
        os.environ.pop(name, None)
    device = torch.device("cuda" if config.workers.num_gpus else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(max(1, int(config.workers.num_cpus)))
    check_shared_root(config, encoding)
    models = (config.vae, config.text_encoder, config.tokenizer)
    image_encoder, text_encoder = load_encoders(models, encoding, device, config.workers.compile)
    try:
        return encode_shard(shard, config, encoding, image_encoder, text_encoder, attempt)
    except RuntimeError as error:
        if "CUDA error" not in str(error):
            raise
        # this process cannot use its GPU again, and would fail each further shard at once: Ray starts another one
        traceback.print_exc()
        os._exit(1)


def check_shared_root(config: PrecomputeConfig, encoding: EncodingRecord) -> None:
    """See that this worker's `output` is the folder that the driver made.

    Raises:
        WorkError: it is not.
    """
    if not (config.output / FILE_NAME).is_file() or EncodingRecord.load(config.output).id != encoding.id:
        raise WorkError(
            f"{config.output} on {os.uname().nodename} is not the latents root that the job made: the nodes do not "
            f"share this folder. Give an `output` that all of them see under one path."
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
    warm_up()
    vae, text_encoder, tokenizer = folders
    precision = encoding.compute_dtype
    return (
        ImageEncoder(vae, device, precision, encoding.image.posterior, compiled),
        TextEncoder(text_encoder, tokenizer, device, precision, compiled),
    )


def explain(error: ray.exceptions.RayError) -> str:
    """A failed attempt for a person: one line where it is an error for people, the traceback where it is a bug."""
    cause = getattr(error, "cause", None)
    return one_line(error) if isinstance(cause, WorkError | RequestError) else str(error)


def one_line(error: Exception) -> str:
    """The cause of a Ray error, without the remote traceback."""
    cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) and error.cause else error
    return f"{type(cause).__name__}: {str(cause).strip().splitlines()[-1] if str(cause).strip() else '(no message)'}"
