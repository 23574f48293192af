"""Latents roots → global batches, in one order that depends on neither ranks nor workers.

StreamingDataset deals out the samples; what it leaves unsaid is checked here: that the streams mean the same thing and
fit the U-Net, that their files are all there, that an epoch delivers every batch that it owes, and in time.
"""

import json
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import torch
from streaming import StreamingDataset
from torch import Tensor
from torch.utils.data import DataLoader

from shards.buckets import Bucket
from shards.encoding import EncodingRecord
from shards.errors import RequestError, WorkError
from shards.files import sha256_file
from shards.root import load_uncond
from train.batch import Batch, Collate
from train.config import DataConfig, StreamConfig
from train.verified import VerifiedStream

DAMAGE_REPORT = "damaged"
GRACE_SECONDS = 120
"""How long a loader's process outlives a SIGTERM."""


@dataclass(frozen=True)
class DataSpec:
    """What the stored numbers mean, and what an epoch of them is."""

    posterior: Literal["moments", "mean"]
    latent_channels: int
    scaling_factor: float
    text_length: int
    text_width: int
    trim: bool
    uncond: Tensor
    """(tokens, width) float16: the empty caption's text latents."""
    uncond_tokens: int
    streams: tuple["OpenStream", ...]
    steps_per_epoch: int


@dataclass(frozen=True)
class OpenStream:
    """A stream whose files were found, and how many of its samples make an epoch."""

    config: StreamConfig
    latent_hw: tuple[int, int]
    num_samples: int
    chosen: int
    index_sha256: str
    encoding_id: str


def open_data(config: DataConfig, global_batch_size: int) -> DataSpec:
    """Find and check every stream.

    Raises:
        RequestError: a root, bucket or file is missing, a bucket holds less than a global batch, or two streams'
            encodings do not mean the same.
    """
    places = [(stream.root.resolve(), stream.bucket) for stream in config.streams]
    for stream, place in zip(config.streams, places, strict=True):
        if places.count(place) > 1:
            raise RequestError(f"data.streams names {stream.root}/{stream.bucket} twice; raise its weight instead.")
    encodings = [EncodingRecord.load(stream.root) for stream in config.streams]
    first = encodings[0]
    for stream, encoding in zip(config.streams[1:], encodings[1:], strict=True):
        differences = encoding_differences(first, encoding)
        if differences:
            raise RequestError(
                f"The roots {config.streams[0].root} and {stream.root} cannot be mixed: {'; '.join(differences)}."
            )
    streams = tuple(_open_stream(s, e, global_batch_size) for s, e in zip(config.streams, encodings, strict=True))
    uncond, uncond_tokens = load_uncond(config.streams[0].root)
    return DataSpec(
        posterior=first.image.posterior,
        latent_channels=first.image.latent_channels,
        scaling_factor=first.image.scaling_factor,
        text_length=first.text.length,
        text_width=first.text.width,
        trim=first.text.trim,
        uncond=uncond,
        uncond_tokens=uncond_tokens,
        streams=streams,
        steps_per_epoch=sum(stream.chosen for stream in streams) // global_batch_size,
    )


def choose_per_epoch(weight: float, num_samples: int, global_batch_size: int) -> int:
    """Samples of a stream in one epoch: weight × n, rounded down to whole global batches."""
    return int(weight * num_samples) // global_batch_size * global_batch_size


def encoding_differences(a: EncodingRecord, b: EncodingRecord) -> list[str]:
    """Fields that differ and change what the numbers mean, as `field: here ≠ there`."""
    # How a picture was cut and scaled may differ, and the dtype: they change the pictures, not what the numbers mean.
    irrelevant = ("image.crop", "image.resampl", "image.decoder", "image.color", "compute_dtype", "schema_version")
    return [difference for difference in a.differences(b) if not difference.startswith(irrelevant)]


def make_loader(
    config: DataConfig, spec: DataSpec, global_batch_size: int, seed: int, step: int, slots: Tensor
) -> DataLoader[Any]:
    """The loader of this rank, standing before global batch number `step` of the whole run.

    Args:
        slots: (n,) this rank's places in the global batch; n is its share of it.
        step: how many global batches of the run are behind it. Where in which epoch that is follows from
            `steps_per_epoch`, so no loader state is ever saved.
    """
    report = Path(tempfile.mkdtemp(prefix="latentmill-")) / DAMAGE_REPORT
    dataset = StreamingDataset(
        streams=[
            VerifiedStream(report, local=str(stream.config.root / stream.config.bucket), choose=stream.chosen)
            for stream in spec.streams
        ],
        batch_size=len(slots),
        shuffle=config.shuffle,
        shuffle_algo="py1s",
        shuffle_seed=seed,
        num_canonical_nodes=config.num_canonical_nodes,
        # one latent shape per global batch
        batching_method="per_stream" if len({stream.latent_hw for stream in spec.streams}) > 1 else "random",
    )
    if step:
        epoch, batch_in_epoch = divmod(step, spec.steps_per_epoch)
        dataset.load_state_dict(
            {
                "epoch": epoch,
                "sample_in_epoch": batch_in_epoch * global_batch_size,
                "num_canonical_nodes": config.num_canonical_nodes,
                "shuffle_seed": seed,
                "initial_physical_nodes": None,
            }
        )
    return DataLoader(
        dataset,
        batch_size=len(slots),
        num_workers=config.num_workers,
        collate_fn=Collate(slots, spec.text_length),
        timeout=config.timeout if config.num_workers else 0,
        persistent_workers=config.num_workers > 0,
        pin_memory=torch.cuda.is_available(),
        worker_init_fn=leave_signals_to_the_trainer,
        prefetch_factor=4 if config.num_workers else None,
    )


def global_batches(loader: DataLoader[Any], spec: DataSpec, step: int) -> Iterator[Batch]:
    """Endless batches from `step` on, epoch after epoch.

    Raises:
        WorkError: an epoch ended short, or no batch came in time: a file is missing or damaged, or storage stalls.
    """
    while True:
        due = spec.steps_per_epoch - step % spec.steps_per_epoch
        delivered = 0
        try:
            for batch in loader:
                delivered += 1
                yield batch
        except Exception as error:  # whatever a worker raised, or the loader's own time-out
            kill_workers(loader)
            raise WorkError(
                f"The loader failed after {step + delivered} steps: {error}. {_what_is_wrong(loader, spec)}"
            ) from error
        if delivered != due:
            raise WorkError(
                f"The epoch ended {due - delivered} global batches short after {step + delivered} steps. "
                f"{_what_is_wrong(loader, spec)}"
            )
        step += delivered


def leave_signals_to_the_trainer(worker: int) -> None:
    """A scheduler signals every process: the trainer saves and leaves, and needs its loader for some steps until then.

    SIGTERM is also how a process that exits ends its loader's workers, so it still ends them, but later.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(GRACE_SECONDS))


def kill_workers(loader: DataLoader[Any]) -> None:
    """End the loader's processes at once, stuck ones too: the exit of this process would wait for them."""
    for process in getattr(loader._iterator, "_workers", ()):
        process.kill()


def _what_is_wrong(loader: DataLoader[Any], spec: DataSpec) -> str:
    dataset: Any = loader.dataset
    report = dataset.streams[0].report
    if report.exists():
        return str(report.read_text())
    for stream in spec.streams:
        folder = stream.config.root / stream.config.bucket
        try:
            for entry in json.loads((folder / "index.json").read_bytes())["shards"]:
                _check_shard(folder, entry)
        except (RequestError, OSError, ValueError) as error:
            return str(error)
    return "Every file is there with its size, and none was found damaged: storage may stall."


def _open_stream(stream: StreamConfig, encoding: EncodingRecord, global_batch_size: int) -> OpenStream:
    folder = stream.root / stream.bucket
    index_path = folder / "index.json"
    if not index_path.is_file():
        present = ", ".join(sorted(path.parent.name for path in stream.root.glob("*/index.json"))) or "none"
        raise RequestError(
            f"The latents root {stream.root} has no bucket {stream.bucket} (it has: {present}). Add it to `buckets` of "
            f"the precompute config and run `make precompute` again; only that bucket is encoded then."
        )
    num_samples = sum(_check_shard(folder, entry) for entry in json.loads(index_path.read_bytes())["shards"])
    chosen = choose_per_epoch(stream.weight, num_samples, global_batch_size)
    if not chosen:
        raise RequestError(
            f"{folder} holds {num_samples} samples; {stream.weight:g} passes over them do not fill one global batch of "
            f"{global_batch_size}. Encode more shards, raise the stream's weight, or lower global_batch_size."
        )
    return OpenStream(
        config=stream,
        latent_hw=Bucket.parse(stream.bucket).latent_hw(encoding.image.downsampling),
        num_samples=num_samples,
        chosen=chosen,
        index_sha256=sha256_file(index_path),
        encoding_id=encoding.id,
    )


def _check_shard(folder: Path, entry: dict[str, Any]) -> int:
    name, size = entry["raw_data"]["basename"], entry["raw_data"]["bytes"]
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise RequestError(f"{folder}/index.json names a file outside its folder, {name!r}. Do not use this root.")
    path = folder / name
    if not path.is_file() or path.stat().st_size != size:
        found = f"{path.stat().st_size} bytes" if path.is_file() else "no file"
        raise RequestError(f"{path}: {found}, but the index says {size} bytes. Restore the file from its copy.")
    return int(entry["samples"])
