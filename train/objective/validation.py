"""Validation loss: held-out latents at eight fixed timesteps under fixed noise, so that only the U-Net changes it."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import Tensor, nn

from shards.base.durable import DamagedFile
from shards.base.errors import RequestError
from shards.base.store import LocalStore, Store
from shards.format.encoding import EncodingRecord
from shards.format.mds import Decoder, hash_file, header_size, parse_offsets
from shards.open import open_store
from shards.root.exclusions import load_exclusion
from shards.root.index import index_columns
from train.data.batch import Batch, Collate
from train.data.draws import Draws
from train.data.node import node_folder
from train.data.selection import FilterConfig, select_part
from train.data.spec import column_lengths, encoding_differences, keep_towers
from train.data.streams import FoundStream, find_stream, map_index
from train.model.ema import Ema
from train.model.sharding import reshard
from train.objective.config import NUM_TIMESTEPS, ValidationConfig
from train.objective.loss import DiffusionLoss, Noised

PLACES = {"middles": 0.5, "starts": 0.0}
NUM_READERS = 16
"""Samples read at once: on a remote root, the round trip dominates."""
FIRST_STEP = 1 << 47
"""Keys of validation draws: steps that no training reaches."""


@dataclass(frozen=True)
class Validation:
    """This rank's share of the held-out samples, in memory, in batches."""

    batches: list[Batch]
    """Each rank has equally many, so that all ranks call sharded weights equally often."""
    seed: int
    every: int
    """Steps between two validations."""
    place: float
    """Of a timestep in its part of the time axis."""
    dealt: bool
    """Whether each sample is looked at in one of the parts alone."""
    weights: str = "raw"
    """`raw` or `ema`."""
    filler: bool = False
    """Whether the last batch only keeps this rank in step: another rank counts it."""

    @contextmanager
    def averaged(self, ema: Ema, unet: nn.Module) -> Iterator[None]:
        """Around a call: the weights that it is to be of are in their place, and then the run's own again."""
        if self.weights == "raw":
            yield
            return
        ema.swap(unet.named_parameters())
        try:
            yield
        finally:
            ema.swap(unet.named_parameters())

    @torch.no_grad()
    def __call__(
        self, unet: nn.Module, loss: DiffusionLoss, accelerator: Accelerator, microbatch_size: int | None = None
    ) -> dict[str, Any]:
        """`val_loss`, and its value at each timestep; every sample has its caption. The ranks share the batches.

        Args:
            microbatch_size: training's, where the graph that was compiled for it is to serve here too; None: batches
                are taken whole.
        """
        timesteps = loss.path.fixed_timesteps(NUM_TIMESTEPS, self.place)
        times = torch.tensor(timesteps, device=accelerator.device)
        sums, counts = torch.zeros(2, NUM_TIMESTEPS, device=accelerator.device)
        for number, batch in enumerate(self.batches, 1):
            moved = batch.to(accelerator.device)
            no_captions_dropped = torch.zeros_like(moved.slots, dtype=torch.bool)
            for k in range(1 if self.dealt else NUM_TIMESTEPS):
                draws = Draws(self.seed, FIRST_STEP + k, moved.slots)
                parts = moved.slots % NUM_TIMESTEPS if self.dealt else torch.full_like(moved.slots, k)
                noised = loss.noised_at(moved, times[parts], no_captions_dropped, draws)
                errors = self.squared_error(unet, loss, noised, microbatch_size)
                if number < len(self.batches) or not self.filler:
                    sums.index_add_(0, parts, errors)
                    counts.index_add_(0, parts, torch.ones_like(errors))
        reshard(unet)
        both: Tensor = accelerator.reduce(torch.stack([sums, counts]), "sum")
        means = both[0] / both[1]
        by_timestep = dict(zip(map(str, timesteps), means.tolist(), strict=True))
        return {"val_loss": float(means.mean()), "val_loss_by_timestep": by_timestep}

    def squared_error(self, unet: nn.Module, loss: DiffusionLoss, noised: Noised, size: int | None) -> Tensor:
        """(N,) of a batch, whole or in filled microbatches of training's size."""
        if size is None:
            return loss.squared_error(unet, noised)
        # a graph that was compiled for training is one with gradients
        with torch.enable_grad():
            errors = []
            for microbatch in noised.microbatches(size, True):
                errors.append(loss.squared_error(unet, microbatch).detach())
                if loss.aligned is not None:
                    loss.aligned.discard()
            return torch.cat(errors)


class HeldOutFile(NamedTuple):
    """An MDS file with validation samples, as the bucket's index lists it."""

    name: str
    """Path below the bucket's folder."""
    samples: int
    hash: int
    """xxh3_64."""


@dataclass(frozen=True)
class FoundValidation:
    """The validation samples of a run; the main process chooses them, so that all ranks use the same."""

    bucket: str
    stream: FoundStream
    rows: tuple[tuple[HeldOutFile, int], ...]
    """(file, row in it) of each sample."""

    @property
    def pin(self) -> dict[str, Any]:
        """The entry in the run's fingerprint that keeps later launches on the same samples."""
        return {
            "bucket": self.bucket,
            "index_sha256": self.stream.index,
            "exclusions": list(self.stream.exclusions),
        }


def find_validation(config: ValidationConfig, pin: Mapping[str, Any] | None = None) -> FoundValidation:
    """Choose the first `samples` of the held-out bucket, in the order of its index, leaving out excluded ones.

    Args:
        pin: `validation` of an earlier checkpoint's fingerprint; it holds if it is for the same bucket.

    Raises:
        RequestError: there is no such root, bucket or index, or it has too few samples.
    """
    assert config.root is not None
    store, bucket = open_store(config.root), config.bucket
    try:
        stream = find_stream(store, bucket, pin or {})
    except RequestError as error:
        if not pin:
            raise
        raise RequestError(
            f"{error} (The run validates on this index since its checkpoint. If validation.root was changed on "
            f"purpose, resume with `--data.index newest`.)"
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
        while len(passing):  # the files of a part follow one another in the index
            count = int(files.samples[number])
            file = HeldOutFile(files.name(number), count, int(files.hashes[number]))
            rows += [(file, int(row)) for row in np.flatnonzero(passing[:count])]
            passing, number = passing[count:], number + 1
    if len(rows) < config.samples:
        after = " that are not excluded" if excluded else ""
        raise RequestError(
            f"{config.root}/{bucket} holds {len(rows)} samples{after}; validation.samples asks for {config.samples}."
        )
    return FoundValidation(bucket, stream, tuple(rows[: config.samples]))


def open_validation(
    config: ValidationConfig,
    training: EncodingRecord,
    seed: int,
    found: FoundValidation | None = None,
    rank: int = 0,
    ranks: int = 1,
) -> Validation:
    """Read this rank's batches of the held-out samples, each sample with its first caption.

    Args:
        training: the encoding of the training data, with the towers that are read.
        found: the samples that the main process chose; None: this process chooses for itself.

    Raises:
        RequestError: the encoding differs from training's in meaning, or what `find_validation` raises.
        DamagedFile: a file is missing or damaged.
    """
    assert config.root is not None
    found = found or find_validation(config)
    encoding = found.stream.encoding
    training = training.model_copy(update={"features": {}})  # nothing is aligned here
    read = [f"texts.{name}" for name in training.texts]
    differences = encoding_differences(training, keep_towers(encoding, read))
    if differences:
        raise RequestError(
            f"The validation root {config.root} does not fit the training data: {'; '.join(differences)}."
        )
    lengths = column_lengths(training.image, training.texts, training.features)
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
    return Validation(batches, seed, config.every, PLACES[config.timesteps], config.dealt, config.weights, filler)


class Reader:
    """Reads single samples, so that no more than these samples are downloaded from a remote root."""

    def __init__(self, store: Store, found: FoundValidation):
        self.store = store
        self.bucket = found.bucket
        self.decode = Decoder(index_columns(found.stream.encoding, found.bucket))
        self.offsets: dict[HeldOutFile, NDArray[np.uint32]] = {}

    def read(self, rows: Sequence[tuple[HeldOutFile, int]]) -> list[dict[str, Any]]:
        """The samples of these rows, in order."""
        new = [file for file in dict.fromkeys(file for file, _ in rows) if file not in self.offsets]
        with ThreadPoolExecutor(NUM_READERS) as readers:
            self.offsets.update(zip(new, readers.map(self._open, new), strict=True))
            return list(readers.map(self._sample, rows))

    def _open(self, file: HeldOutFile) -> NDArray[np.uint32]:
        """The offsets of a file. A local file is hashed; of a remote one only the header is read and checked."""
        name = f"{self.bucket}/{file.name}"
        where = self.store.where(name)
        try:
            if isinstance(self.store, LocalStore) and hash_file(where) != file.hash:
                raise DamagedFile(f"{where} is damaged: its hash differs from the index. Restore it from its copy.")
            return parse_offsets(self.store.read_range(name, 0, header_size(file.samples)), file.samples, where)
        except FileNotFoundError:
            raise DamagedFile(f"{where} is missing, and validation reads it. Restore it from its copy.") from None

    def _sample(self, row: tuple[HeldOutFile, int]) -> dict[str, Any]:
        file, number = row
        name = f"{self.bucket}/{file.name}"
        begin, end = self.offsets[file][number : number + 2].tolist()
        data = self.store.read_range(name, begin, end)
        if len(data) != end - begin:
            raise DamagedFile(f"{self.store.where(name)} ends before its last sample. Restore it from its copy.")
        return self.decode(data)
