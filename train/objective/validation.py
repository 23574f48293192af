"""Validation loss: held-out latents at eight fixed timesteps under fixed noise, so that only the U-Net changes it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import torch
from accelerate import Accelerator
from pydantic import Field, model_validator
from torch import Tensor, nn

from shards.base.config import Config
from shards.base.errors import RequestError
from shards.base.store import Place
from shards.format.buckets import BucketName
from shards.format.encoding import EncodingRecord
from shards.open import open_store
from shards.root.committed import load_receipts
from shards.root.reading import read_parts
from train.data.batch import Batch, Collate
from train.data.draws import Draws
from train.data.spec import column_lengths, encoding_differences, only_read
from train.model.ema import Ema
from train.model.sharding import reshard
from train.objective.loss import DiffusionLoss, Noised

NUM_TIMESTEPS = 8
PLACES = {"middles": 0.5, "starts": 0.0}
FIRST_STEP = 1 << 47
"""Keys of validation draws: steps that no training reaches."""


class ValidationConfig(Config):
    """Held-out samples whose loss is taken now and then; a root of its own, encoded as the training data is."""

    root: Place | None = None
    """The latents root, a folder or an address; null: no validation."""
    bucket: BucketName = "256x256"
    """WIDTHxHEIGHT in pixels."""
    samples: int = Field(1024, ge=1)
    """How many, from the root's first on."""
    batch_size: int = Field(64, ge=1)
    """Samples per forward pass."""
    every: int = Field(1000, ge=1)
    """Steps; the value goes with that step's line of metrics.jsonl, so `log.every` must divide it."""
    timesteps: Literal["middles", "starts"] = "middles"
    """Of eight equal parts of the time axis; the starts of flow matching's, t = k/8, are MLPerf's for FLUX.1."""
    dealt: bool = False
    """Each sample at one of the eight, in turn, as MLPerf has it; false: at all, for eight times the cost."""
    weights: Literal["raw", "ema"] = "raw"
    """Whose loss; ema: the moving average's, where it is held, which takes the weights' place meanwhile."""

    @model_validator(mode="after")
    def _check(self) -> "ValidationConfig":
        if self.dealt and self.samples < NUM_TIMESTEPS:
            raise ValueError(
                f"samples {self.samples}, dealt to {NUM_TIMESTEPS} timesteps, leave some without; give more"
            )
        return self


@dataclass(frozen=True)
class Validation:
    """Held-out samples, in memory, in batches."""

    batches: list[Batch]
    seed: int
    every: int
    """Steps between two validations."""
    place: float
    """Of a timestep in its part of the time axis."""
    dealt: bool
    """Whether each sample is looked at in one of the parts alone."""
    weights: str = "raw"
    """`raw` or `ema`."""

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
        ranks = accelerator.num_processes
        # all ranks go as often through a U-Net that they hold shares of; what one does over again does not count
        for first in range(0, len(self.batches), ranks):
            place = first + accelerator.process_index
            moved = self.batches[place % len(self.batches)].to(accelerator.device)
            no_captions_dropped = torch.zeros_like(moved.slots, dtype=torch.bool)
            for k in range(1 if self.dealt else NUM_TIMESTEPS):
                draws = Draws(self.seed, FIRST_STEP + k, moved.slots)
                parts = moved.slots % NUM_TIMESTEPS if self.dealt else torch.full_like(moved.slots, k)
                noised = loss.noised_at(moved, times[parts], no_captions_dropped, draws)
                errors = self.squared_error(unet, loss, noised, microbatch_size)
                if place < len(self.batches):
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
                    loss.aligned.forget()
            return torch.cat(errors)


def open_validation(config: ValidationConfig, training: EncodingRecord, seed: int) -> Validation:
    """Read the first `samples` of the held-out bucket, in receipt order, each with its first caption.

    Args:
        training: the encoding of the training data, with the towers that are read.

    Raises:
        RequestError: no such root or bucket, too few samples, or an encoding that does not mean what training's does.
    """
    assert config.root is not None
    store = open_store(config.root)
    encoding = EncodingRecord.load(store)
    training = training.model_copy(update={"features": {}})  # nothing is aligned here
    read = [f"texts.{name}" for name in training.texts]
    differences = encoding_differences(training, only_read(encoding, read))
    if differences:
        raise RequestError(
            f"The validation root {config.root} does not fit the training data: {'; '.join(differences)}."
        )
    parts = [receipt.part for receipt in load_receipts(store) if receipt.bucket == config.bucket]
    samples = list(islice(read_parts(store, config.bucket, parts), config.samples))
    if len(samples) < config.samples:
        raise RequestError(
            f"{config.root}/{config.bucket} holds {len(samples)} samples; validation.samples asks for {config.samples}."
        )
    batches = []
    for start in range(0, len(samples), config.batch_size):
        some = samples[start : start + config.batch_size]
        slots = torch.arange(start, start + len(some))
        batch = Collate(slots, column_lengths(training.image, training.texts, training.features))(some)
        batches.append(batch.with_captions(torch.zeros_like(slots)))
    return Validation(batches, seed, config.every, PLACES[config.timesteps], config.dealt, config.weights)
