"""Training on stored latents matches online training, which encodes images and captions at every step.

The online loop is plain diffusers and transformers (AutoencoderKL and CLIPTextModel) in float32. It shares only the
keyed draws and the image decoding with the product. `pytest -s -m slow` prints the figures of docs/evidence/curves.md.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from torch import Tensor
from transformers import CLIPTextModel, CLIPTokenizer

from precompute.pixels.decode import LimitsConfig, PixelsConfig, decode
from shards.format.buckets import Bucket
from tests.fixtures import encode_all, precompute_config
from tests.runs import UNET, train_fields
from tests.tiny import make_samples, make_tar, read_tar
from train.config import TrainConfig
from train.data.draws import Draws, Purpose
from train.prepare import prepare
from train.setup import build_step, make_loader

BATCH, SEED, SIDE = 8, 5, 64
SHORT, LONG = 15, 50
"""Steps in `make test`, for the cases that together use every way of storing, and in the slow suite, for all cases."""
LR, WEIGHT_DECAY, DROPOUT = 1e-3, 0.01, 0.1
FIELDS = ["txt", "json:blip", "json:human"]


@dataclass(frozen=True)
class Case:
    """A way to store latents, the online settings that correspond to it, and how far the curves may differ."""

    name: str
    storage: str
    trim: bool
    fields: list[str]
    tolerance: float
    """Bound on the largest relative difference over the curve, about four times what was measured."""
    image: str = "float16"
    is_short: bool = False


CASES = [
    Case("float16", "float16", False, ["txt"], 1e-4),
    Case("float8", "float8", False, ["txt"], 1.2e-3),
    Case("float8, image int8", "float8", False, ["txt"], 7e-3, "int8", is_short=True),  # the default
    Case("float16, trim", "float16", True, ["txt"], 3e-4),
    Case("float8, trim", "float8", True, ["txt"], 1.3e-3),
    Case("float16, trim, three captions", "float16", True, FIELDS, 1.5e-4, is_short=True),
]


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tar of 40 images with one to three captions each, some short and some longer than the text tower allows."""
    folder = tmp_path_factory.mktemp("tars")
    samples = make_samples(0, 40, [(80, 64), (90, 120), (64, 64)])
    for i, (_, members) in enumerate(samples):
        metadata = json.loads(members["json"])
        for name in ("blip", "human")[: i % 3]:
            metadata[name] = f"{name} {i}" + "!" * (i % 7)
        members["txt"] = f"{i} blobs".encode() * (1 + i % 4)
        members["json"] = json.dumps(metadata).encode()
    make_tar(folder, "00000", samples)
    return folder


def cached(case: Case, models: Path, tars: Path, folder: Path, steps: int) -> tuple[list[float], list[list[str]]]:
    """Run stage 1, then the training step; return the loss and the keys of each step."""
    changes: dict[str, Any] = {"captions": case.fields, "text": {"storage": case.storage, "trim": case.trim}}
    changes["image"] = {"storage": case.image}
    encode_all(precompute_config(models, tars, folder / "root", buckets=["64x64"], **changes))
    fields = train_fields(
        folder / "root",
        folder / "run",
        UNET,
        seed=SEED,
        max_steps=steps,
        global_batch_size=BATCH,
        optimizer={"lr": LR, "weight_decay": WEIGHT_DECAY},
        schedule={"warmup_steps": 0},
        objective={"caption_dropout": DROPOUT},
    )
    config, accelerator = TrainConfig.model_validate(fields), Accelerator(cpu=True)
    prepared = prepare(config, accelerator)
    train_step, _ = build_step(config, prepared, accelerator)
    losses, keys = [], []
    for step, batch in zip(range(steps), make_loader(config, prepared, accelerator, step=0), strict=False):
        keys.append(batch.keys)
        losses.append(train_step(batch, step).sums.total / BATCH)
    return losses, keys


class Online:
    """An online training loop that encodes pixels and captions at every step."""

    def __init__(self, models: Path, tars: Path):
        self.vae = AutoencoderKL.from_pretrained(models / "vae").eval()
        self.text_encoder = CLIPTextModel.from_pretrained(models / "text_encoder").eval()
        self.tokenizer = CLIPTokenizer.from_pretrained(models / "tokenizer")
        self.members = read_tar(tars / "00000.tar")

    def train(self, keys: list[list[str]], trim: bool, fields: list[str]) -> list[float]:
        """Return the loss of each step on the samples `keys`."""
        torch.manual_seed(SEED)
        unet = UNet2DConditionModel.from_config(json.loads(UNET.read_text()))
        optimizer = torch.optim.AdamW(unet.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
        scheduler = DDPMScheduler(1000, 0.00085, 0.012, "scaled_linear")
        losses = []
        for step, step_keys in enumerate(keys):
            draws = Draws(SEED, step, torch.arange(BATCH))
            latents = self.latents(step_keys, draws)
            states, mask = self.states(step_keys, fields, draws)
            noise, timesteps = draws.normal(Purpose.NOISE, latents.shape[1:]), draws.integers(Purpose.TIMESTEP, 1000)
            noisy = scheduler.add_noise(latents, noise, timesteps)
            prediction = unet(noisy, timesteps, states, encoder_attention_mask=mask if trim else None).sample
            loss = F.mse_loss(prediction, noise)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    @torch.no_grad()
    def latents(self, keys: list[str], draws: Draws) -> Tensor:
        """Encode images to (N, C, h, w): `latent_dist.sample()` with keyed normals, times the scaling factor."""
        posterior = self.vae.encode(torch.stack([self.pixels(key) for key in keys])).latent_dist
        noise = draws.normal(Purpose.POSTERIOR, posterior.mean.shape[1:])
        return (posterior.mean + posterior.std * noise) * self.vae.config.scaling_factor

    def pixels(self, key: str) -> Tensor:
        """Return (3, SIDE, SIDE) in [-1, 1], cropped and resized as in stage 1 (tests/precompute/pixels)."""
        picture = decode(self.members[key]["jpg"], [Bucket(SIDE, SIDE)], PixelsConfig(), LimitsConfig())
        image = picture.pixels[Bucket(SIDE, SIDE)]
        return torch.tensor(image).permute(2, 0, 1) / 127.5 - 1

    @torch.no_grad()
    def states(self, keys: list[str], fields: list[str], draws: Draws) -> tuple[Tensor, Tensor]:
        """Encode one caption per sample, or the empty one, to hidden states (N, tokens, width) and their token mask."""
        captions = [self.captions(key, fields) for key in keys]
        choice = draws.integers(Purpose.CAPTION_CHOICE, torch.tensor([len(texts) for texts in captions]))
        dropped = draws.bernoulli(Purpose.CAPTION_DROPOUT, DROPOUT, 1)[:, 0]
        chosen = ["" if dropped[i] else texts[choice[i]] for i, texts in enumerate(captions)]
        tokens = self.tokenizer(chosen, padding="max_length", truncation=True, return_tensors="pt")
        return self.text_encoder(tokens.input_ids).last_hidden_state, tokens.attention_mask.float()

    def captions(self, key: str, fields: list[str]) -> list[str]:
        """Return those of the caption fields that the sample has."""
        members = self.members[key]
        found = {"txt": members["txt"].decode()}
        found |= {f"json:{name}": value for name, value in json.loads(members["json"]).items()}
        return [found[field] for field in fields if field in found]


@pytest.mark.parametrize(
    ("case", "steps"),
    [
        *(pytest.param(case, SHORT, id=case.name) for case in CASES if case.is_short),
        *(pytest.param(case, LONG, id=f"{case.name}, long", marks=pytest.mark.slow) for case in CASES),
    ],
)
def test_the_curves_agree(case: Case, steps: int, models: Path, tars: Path, tmp_path: Path) -> None:
    losses, keys = cached(case, models, tars, tmp_path, steps)
    expected = Online(models, tars).train(keys, case.trim, case.fields)
    differences = [abs(one - other) / other for one, other in zip(losses, expected, strict=True)]
    print(f"\n| {case.name} | {max(differences):.1e} | {np.mean(differences):.1e} |")
    assert len(losses) == steps and np.mean(expected[-5:]) < 0.9 * np.mean(expected[:5])  # it learns
    assert max(differences) < case.tolerance
