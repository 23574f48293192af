"""Which sample is looked at at which timestep, and what is made of it."""

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from tests.train.specs import CHANNELS, TOKENS, WIDTH, make_batch
from train.data.batch import Batch
from train.data.draws import Draws
from train.objective.loss import Noised
from train.objective.paths import ObjectiveConfig, noise_path
from train.objective.validation import PLACES, Validation

SAMPLES = 21


class TellTale:
    """A loss that is an error that tells the sample and the timestep."""

    path = noise_path(ObjectiveConfig(prediction="flow_matching"), torch.device("cpu"))
    aligned = None

    def noised_at(self, batch: Batch, timesteps: Tensor, dropped: Tensor, draws: Draws) -> Noised:
        assert not dropped.any() and draws.slots.equal(batch.slots)
        return Noised(batch, dropped, timesteps, timesteps, timesteps)

    def squared_error(self, unet: object, noised: Noised) -> Tensor:
        return (noised.batch.slots.float() ** 2 + noised.timesteps)[: noised.num_real]


@pytest.mark.parametrize("dealt", [False, True])
@pytest.mark.parametrize("places", ["middles", "starts"])
@pytest.mark.parametrize("microbatch_size", [None, 3])
def test_each_sample_at_all_timesteps_or_at_one_in_turn(dealt: bool, places: str, microbatch_size: int | None) -> None:
    """Against MLPerf's loop for FLUX.1: sample i at t = (i mod 8)/8, a mean for each t, and their mean."""
    batches = []
    for start in range(0, SAMPLES, 4):
        slots = torch.arange(start, min(start + 4, SAMPLES))
        latents, text = torch.randn(len(slots), CHANNELS, 8, 8).half(), torch.randn(len(slots), TOKENS, WIDTH).half()
        batches.append(make_batch([""] * len(slots), slots, latents, text))
    validation = Validation(batches, seed=0, every=1, place=PLACES[places], dealt=dealt)
    found = validation(torch.nn.Identity(), TellTale(), Accelerator(cpu=True), microbatch_size)  # type: ignore[arg-type]

    sums, counts = [0.0] * 8, [0] * 8
    for i in range(SAMPLES):
        for k in [i % 8] if dealt else range(8):
            sums[k] += i**2 + (1000 * k / 8 if places == "starts" else 1000 * (k + 0.5) / 8)
            counts[k] += 1
    means = [total / count for total, count in zip(sums, counts, strict=True)]
    assert list(found["val_loss_by_timestep"].values()) == pytest.approx(means, rel=1e-6)
    assert found["val_loss"] == pytest.approx(sum(means) / 8, rel=1e-6)
