"""Validation loss on held-out latents. Its timesteps and noise are fixed, so it depends only on the weights."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import Tensor, nn

from shards.base.durable import DamagedFile
from shards.base.errors import RequestError
from shards.base.store import LocalStore, Store
from shards.base.table import counted
from shards.format.encoding import EncodingRecord
from shards.format.mds import Decoder, hash_file, read_offsets, read_sample
from shards.format.text import with_duplicate_text
from shards.open import open_store
from shards.root.exclusions import load_exclusion
from shards.root.index import index_columns
from train.data.batch import Batch, Collate
from train.data.draws import Draws
from train.data.node import node_folder
from train.data.selection import FilterConfig, select_part
from train.data.spec import FoundStream, column_lengths, encoding_differences, keep_towers
from train.data.streams import find_stream, map_index
from train.model.ema import Ema
from train.model.sharding import reshard
from train.objective.config import NUM_TIMESTEPS, ValidationConfig
from train.objective.loss import DiffusionLoss, NoisyBatch

PLACES = {"middles": 0.5, "starts": 0.0}
"""Position of each timestep within its eighth of the time axis, for each value of `validation.timesteps`."""
NUM_READERS = 16
"""Number of samples that are read concurrently, because round trips dominate on a remote root."""
FIRST_STEP = 1 << 47
"""Step from which the random numbers at the first timestep are drawn. No training run reaches this step."""


@dataclass(frozen=True)
class Validation:
    """This rank's share of the held-out samples, in memory."""

    batches: list[Batch]
    """Batches of this rank. Every rank has the same number, because all ranks must call a sharded network equally
    often."""
    seed: int
    config: ValidationConfig
    filler: bool = False
    """Whether the last batch only keeps this rank in step with the others. Its samples are counted by another rank."""

    @contextmanager
    def averaged(self, ema: Ema, network: nn.Module) -> Iterator[None]:
        """Swap in the moving average while the context is open, if `validation.weights` is `ema`."""
        if self.config.weights == "raw":
            yield
            return
        ema.swap(network.named_parameters())
        try:
            yield
        finally:
            ema.swap(network.named_parameters())

    @torch.no_grad()
    def __call__(
        self, network: nn.Module, loss: DiffusionLoss, accelerator: Accelerator, microbatch_size: int | None = None
    ) -> dict[str, Any]:
        """Return `val_loss` and `val_loss_by_timestep`, computed over all ranks. No captions are dropped.

        Args:
            microbatch_size: microbatch size of training, to reuse the graph compiled for it; None: run whole batches.
        """
        timesteps = loss.path.fixed_timesteps(NUM_TIMESTEPS, PLACES[self.config.timesteps])
        times = torch.tensor(timesteps, device=accelerator.device)
        sums, counts = torch.zeros(2, NUM_TIMESTEPS, device=accelerator.device)
        for number, batch in enumerate(self.batches, 1):
            moved = batch.to(accelerator.device)
            no_captions_dropped = torch.zeros_like(moved.slots, dtype=torch.bool)
            for k in range(1 if self.config.dealt else NUM_TIMESTEPS):
                random = loss.draw(moved, Draws(self.seed, FIRST_STEP + k, moved.slots))
                parts = moved.slots % NUM_TIMESTEPS if self.config.dealt else torch.full_like(moved.slots, k)
                noisy = loss.add_noise_at(moved, times[parts], no_captions_dropped, random)
                errors = self.squared_error(network, loss, noisy, microbatch_size)
                if number < len(self.batches) or not self.filler:
                    sums.index_add_(0, parts, errors)
                    counts.index_add_(0, parts, torch.ones_like(errors))
        reshard(network)
        both: Tensor = accelerator.reduce(torch.stack([sums, counts]), "sum")
        means = both[0] / both[1]
        by_timestep = dict(zip(map(str, timesteps), means.tolist(), strict=True))
        return {"val_loss": float(means.mean()), "val_loss_by_timestep": by_timestep}

    def squared_error(self, network: nn.Module, loss: DiffusionLoss, noisy: NoisyBatch, size: int | None) -> Tensor:
        """Return a batch's errors, (N,), computed in padded microbatches of `size`, or on the whole batch if None."""
        if size is None:
            return loss.squared_error(network, noisy)
        # the graph compiled for training expects gradients to be enabled
        with torch.enable_grad():
            errors = []
            microbatches = list(noisy.microbatches(size, filled=True))
            # a short batch takes as many passes as the other ranks' batches, because all ranks must call a sharded
            # network equally often
            num_more = -(-self.config.batch_size // size) - len(microbatches)
            for microbatch in [*microbatches, *microbatches[:1] * num_more]:
                errors.append(loss.squared_error(network, microbatch).detach())
                if loss.aligned is not None:
                    loss.aligned.discard()
            return torch.cat(errors[: len(microbatches)])


class HeldOutFile(NamedTuple):
    """An MDS file with validation samples, as listed in the bucket's index."""

    name: str
    """Path relative to the bucket's folder."""
    samples: int
    hash: int
    """xxh3_64 hash of the file."""


@dataclass(frozen=True)
class FoundValidation:
    """The validation samples of a run, which the main process chooses so that all ranks use the same samples."""

    bucket: str
    stream: FoundStream
    rows: tuple[tuple[HeldOutFile, int], ...]
    """File of each sample, and the sample's row in the file."""

    @property
    def pin(self) -> dict[str, Any]:
        """Entry in the run's fingerprint that makes later launches validate on the same samples."""
        return {
            "bucket": self.bucket,
            "index_sha256": self.stream.index,
            "exclusions": list(self.stream.exclusions),
        }


def find_validation(config: ValidationConfig, pin: Mapping[str, Any] | None = None) -> FoundValidation:
    """Choose the first `config.samples` samples of the held-out bucket in index order, skipping excluded samples.

    Args:
        pin: the `validation` entry of an earlier checkpoint's fingerprint; ignored if it is for a different bucket.

    Raises:
        RequestError: the root, bucket or index does not exist, or the bucket has too few samples.
    """
    assert config.root is not None
    store, bucket = open_store(config.root), config.bucket
    try:
        stream = find_stream(store, bucket, pin or {})
    except RequestError as error:
        if not pin:
            raise
        raise RequestError(
            f"{error} The run's checkpoint is pinned to this index for validation. If validation.root was changed on "
            f"purpose, resume with `--data.index newest`, which also switches training to the newest indexes of its "
            f"roots."
        ) from error
    files = map_index(store, bucket, stream, node_folder(None))
    excluded = [load_exclusion(store, id) for id in stream.exclusions]
    rows: list[tuple[HeldOutFile, int]] = []
    number = 0
    for part in files.parts:
        if len(rows) >= config.samples:
            break
        passing = np.ones(int(part["samples"]), bool)
        if excluded:
            passing, _ = select_part(store, bucket, part, FilterConfig(), excluded)
        while len(passing):  # a part's files are consecutive in the index
            count = int(files.samples[number])
            file = HeldOutFile(files.name(number), count, int(files.hashes[number]))
            rows += [(file, int(row)) for row in np.flatnonzero(passing[:count])]
            passing, number = passing[count:], number + 1
    if len(rows) < config.samples:
        after = " without the excluded ones" if excluded else ""
        remedy = f"Lower validation.samples to {len(rows)} or less." if rows else "Choose a different validation.root."
        raise RequestError(
            f"{config.root}/{bucket} has {counted(len(rows), 'sample')}{after}, but validation.samples is "
            f"{config.samples}. {remedy}"
        )
    return FoundValidation(bucket, stream, tuple(rows[: config.samples]))


def open_validation(
    config: ValidationConfig,
    training: EncodingRecord,
    seed: int,
    found: FoundValidation,
    rank: int,
    ranks: int,
) -> Validation:
    """Read this rank's batches of held-out samples into memory. Each sample has only its first caption.

    Args:
        training: the encoding of the training data, reduced to the towers that the run reads.
        found: the samples that the main process chose.

    Raises:
        RequestError: the root is encoded differently from the training data.
        DamagedFile: a file is missing or damaged.
    """
    assert config.root is not None
    encoding = found.stream.encoding
    training = training.model_copy(update={"features": {}})  # validation computes no alignment loss
    read = [f"texts.{name}" for name in training.texts]
    differences = encoding_differences(training, keep_towers(encoding, read))
    if differences:
        raise RequestError(
            f"The validation root {config.root} is encoded differently from the training data: "
            f"{'; '.join(differences)}. Encode both with the same models and settings."
        )
    lengths = column_lengths(training)
    total = -(-len(found.rows) // config.batch_size)
    places = [first + rank for first in range(0, total, ranks)]
    reader, batches = Reader(open_store(config.root), found), []
    for place in places:
        start = place % total * config.batch_size
        rows = found.rows[start : start + config.batch_size]
        slots = torch.arange(start, start + len(rows))
        batch = Collate(slots, lengths)(reader.read(rows))
        batches.append(batch.with_captions(torch.zeros_like(slots)))
    filler = places[-1] >= total
    return Validation(batches, seed, config, filler)


class Reader:
    """Reader that fetches single samples by range requests, so that a remote root need not be downloaded."""

    def __init__(self, store: Store, found: FoundValidation):
        self.store = store
        self.bucket = found.bucket
        self.decode = Decoder(index_columns(found.stream.encoding, found.bucket))
        self.offsets: dict[HeldOutFile, NDArray[np.uint32]] = {}

    def read(self, rows: Sequence[tuple[HeldOutFile, int]]) -> list[dict[str, Any]]:
        """Return the samples of these rows, in order."""
        new = [file for file in dict.fromkeys(file for file, _ in rows) if file not in self.offsets]
        with ThreadPoolExecutor(NUM_READERS) as readers:
            self.offsets.update(zip(new, readers.map(self._open, new), strict=True))
            return list(readers.map(self._sample, rows))

    def _open(self, file: HeldOutFile) -> NDArray[np.uint32]:
        """Read a file's sample offsets. The file's hash is verified first, but only if the file is local."""
        name = f"{self.bucket}/{file.name}"
        where = self.store.where(name)
        try:
            if isinstance(self.store, LocalStore) and hash_file(where) != file.hash:
                raise DamagedFile(f"{where} is damaged: its hash does not match its index. Restore it from a backup.")
            return read_offsets(partial(self.store.read_range, name), file.samples, where)
        except FileNotFoundError:
            raise DamagedFile(f"{where} is missing, but validation needs it. Restore it from a backup.") from None

    def _sample(self, row: tuple[HeldOutFile, int]) -> dict[str, Any]:
        file, number = row
        return with_duplicate_text(self._stored(file, number), number, lambda first: self._stored(file, first))

    def _stored(self, file: HeldOutFile, number: int) -> dict[str, Any]:
        name = f"{self.bucket}/{file.name}"
        read = partial(self.store.read_range, name)
        return self.decode(read_sample(read, self.offsets[file], number, self.store.where(name)))
