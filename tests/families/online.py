"""Online training: a loop over plain diffusers that encodes pictures and captions at every step.

The family's diffusers pipeline encodes captions (`encode_prompt`) and pictures, and the network is called like in that
pipeline. The loop shares only the keyed draws and the decoded pixels with the product.
"""

import io
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from PIL import Image
from torch import Tensor

from precompute.pixels.decode import LimitsConfig, PixelsConfig, decode
from shards.format.buckets import Bucket
from tests.families.small import TEMPLATE, TOKENS, Small
from tests.tiny import read_tar
from train.config import TrainConfig
from train.data.draws import Draws, Purpose
from train.objective.config import ShiftConfig

SIDE = 64
Embeds = dict[str, Tensor]


class Online:
    """A family's pipeline and its tar."""

    def __init__(self, small: Small, network: Any, config: TrainConfig):
        self.name, self.config, self.network = small.family.name, config, network
        self.pipeline = small.pipeline(network, DDPMScheduler())
        self.members = read_tar(small.tar)

    def train(self, keys: list[list[str]], lr: float, weight_decay: float) -> list[float]:
        """Return the loss of each step on the samples `keys`."""
        optimizer = torch.optim.AdamW(self.network.parameters(), lr=lr, weight_decay=weight_decay)
        losses = []
        for step, names in enumerate(keys):
            draws = Draws(self.config.seed, step, torch.arange(len(names)))
            loss = self.loss(names, draws)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def loss(self, keys: list[str], draws: Draws) -> Tensor:
        """Return the mean squared error of one step."""
        latents = self.latents(keys, draws)
        noise = draws.normal(Purpose.NOISE, tuple(latents.shape[1:]))
        given = CALLS[self.name](self.embed(keys, draws), self.sizes(keys))
        objective = self.config.objective
        if objective.prediction != "flow_matching":
            scheduler = DDPMScheduler(1000, objective.beta_start, objective.beta_end, objective.beta_schedule)
            times = draws.integers(Purpose.TIMESTEP, 1000)
            prediction = self.call(scheduler.add_noise(latents, noise, times), times, given)
            return F.mse_loss(prediction, noise)
        t = draws.uniform(Purpose.TIMESTEP)
        if objective.timestep_sampling == "logit_normal":
            t = torch.sigmoid(draws.normal(Purpose.TIMESTEP, ()))
        t = shifted(t, objective.shift, latents.shape[2] * latents.shape[3] // 4)
        at = t[:, None, None, None]
        return F.mse_loss(self.call((1 - at) * latents + at * noise, t * 1000, given), noise - latents)

    def call(self, noisy: Tensor, times: Tensor, given: dict[str, Any]) -> Tensor:
        """Call the network on a batch like the pipeline."""
        if self.name == "flux1":
            n, channels, h, w = noisy.shape
            packed = self.pipeline._pack_latents(noisy, n, channels, h, w)
            ids = self.pipeline._prepare_latent_image_ids(n, h // 2, w // 2, noisy.device, noisy.dtype)
            guidance = torch.full((n,), 3.5)
            output = self.network(
                hidden_states=packed, timestep=times / 1000, img_ids=ids, guidance=guidance, return_dict=False, **given
            )[0]
            unpacked: Tensor = self.pipeline._unpack_latents(output, h * 8, w * 8, 8)
            return unpacked
        if self.name == "prx":
            times = times / 1000
        prediction: Tensor = self.network(noisy, timestep=times, return_dict=False, **given)[0]
        return prediction.chunk(2, dim=1)[0] if self.name == "pixart-sigma" else prediction

    @torch.no_grad()
    def latents(self, keys: list[str], draws: Draws) -> Tensor:
        """Encode the pictures to normalised latents (N, C, h, w), with keyed draws where the autoencoder samples."""
        vae = self.pipeline.vae
        encoded = vae.encode(torch.stack([self.pixels(key) for key in keys]))
        if hasattr(encoded, "latent"):
            found: Tensor = encoded.latent
        else:
            posterior = encoded.latent_dist
            found = posterior.mean + posterior.std * draws.normal(Purpose.POSTERIOR, tuple(posterior.mean.shape[1:]))
        return (found - (vae.config.get("shift_factor") or 0.0)) * vae.config.scaling_factor

    def pixels(self, key: str) -> Tensor:
        """Return (3, SIDE, SIDE) in [-1, 1], cropped and scaled as in stage 1 (tests/precompute/pixels)."""
        picture = decode(self.members[key]["jpg"], [Bucket(SIDE, SIDE)], PixelsConfig(), LimitsConfig())
        return torch.tensor(picture.pixels[Bucket(SIDE, SIDE)]).permute(2, 0, 1) / 127.5 - 1

    def sizes(self, keys: list[str]) -> Tensor:
        """Return SDXL's size conditioning (N, 6): original height and width, crop top and left, bucket height and
        width."""
        rows = []
        for key in keys:
            width, height = Image.open(io.BytesIO(self.members[key]["jpg"])).size
            scale = SIDE / min(width, height)
            top, left = (max(0, (round(side * scale) - SIDE) // 2) for side in (height, width))
            rows.append([height, width, top, left, SIDE, SIDE])
        return torch.tensor(rows).float()

    @torch.no_grad()
    def embed(self, keys: list[str], draws: Draws) -> Embeds:
        """Encode the captions with `encode_prompt`, with some of them dropped."""
        captions = [self.members[key]["txt"].decode() for key in keys]
        towers = 3 if self.config.backbone.drop == "apart" else 1
        dropped = draws.bernoulli(Purpose.CAPTION_DROPOUT, self.config.objective.caption_dropout, towers)
        return EMBEDS[self.name](self.pipeline, captions, dropped)


def emptied(captions: list[str], dropped: Tensor) -> list[str]:
    """Return the captions, with the `dropped` (N,) ones empty."""
    return ["" if gone else caption for caption, gone in zip(captions, dropped.tolist(), strict=True)]


def embed_sd(pipeline: Any, captions: list[str], dropped: Tensor) -> Embeds:
    """Encode captions for Stable Diffusion 1 and 2."""
    return {"states": pipeline.encode_prompt(emptied(captions, dropped[:, 0]), "cpu", 1, False)[0]}


def embed_sdxl(pipeline: Any, captions: list[str], dropped: Tensor) -> Embeds:
    """Encode captions for SDXL, with zeros for dropped captions, like `force_zeros_for_empty_prompt`."""
    assert pipeline.config.force_zeros_for_empty_prompt
    states, _, pooled, _ = pipeline.encode_prompt(captions, device="cpu", do_classifier_free_guidance=False)
    return {"states": states * ~dropped[:, :, None], "pooled": pooled * ~dropped}


def embed_pixart(pipeline: Any, captions: list[str], dropped: Tensor) -> Embeds:
    """Encode captions to states with a token mask."""
    found = pipeline.encode_prompt(emptied(captions, dropped[:, 0]), False, max_sequence_length=TOKENS)
    return {"states": found[0], "mask": found[1]}


def embed_sd3(pipeline: Any, captions: list[str], dropped: Tensor) -> Embeds:
    """Encode captions for SD3, where each tower drops captions independently."""
    prompts = [emptied(captions, column) for column in dropped.unbind(1)]
    found = pipeline.encode_prompt(*prompts, do_classifier_free_guidance=False, max_sequence_length=TOKENS)
    return {"states": found[0], "pooled": found[2]}


def embed_flux(pipeline: Any, captions: list[str], dropped: Tensor) -> Embeds:
    """Encode captions to T5's states and CLIP's pooled output."""
    states, pooled, ids = pipeline.encode_prompt(emptied(captions, dropped[:, 0]), None, max_sequence_length=TOKENS)
    return {"states": states, "pooled": pooled, "ids": ids}


def embed_sana(pipeline: Any, captions: list[str], dropped: Tensor) -> Embeds:
    """Encode captions for SANA: the instruction precedes prompts, but not the empty unconditional prompt."""
    pairs = []
    for caption, gone in zip(captions, dropped[:, 0].tolist(), strict=True):
        instruction = [TEMPLATE.removesuffix("{}")]
        found = pipeline.encode_prompt(
            caption, True, "", max_sequence_length=TOKENS, complex_human_instruction=instruction
        )
        pairs.append(found[2:] if gone else found[:2])
    states, masks = zip(*pairs, strict=True)
    return {"states": torch.cat(states), "mask": torch.cat(masks)}


def embed_prx(pipeline: Any, captions: list[str], dropped: Tensor) -> Embeds:
    """Encode captions to states with a token mask."""
    found = pipeline.encode_prompt(
        emptied(captions, dropped[:, 0]),
        do_classifier_free_guidance=False,
        tokenizer_max_length=TOKENS,
    )
    return {"states": found[0], "mask": found[1]}


EMBEDS: dict[str, Callable[[Any, list[str], Tensor], Embeds]] = {
    "sd2": embed_sd,
    "sd15": embed_sd,
    "sdxl": embed_sdxl,
    "pixart-sigma": embed_pixart,
    "sd3": embed_sd3,
    "flux1": embed_flux,
    "sana": embed_sana,
    "prx": embed_prx,
}
CALLS: dict[str, Callable[[Embeds, Tensor], dict[str, Any]]] = {
    "sd2": lambda e, sizes: {"encoder_hidden_states": e["states"]},
    "sd15": lambda e, sizes: {"encoder_hidden_states": e["states"]},
    "sdxl": lambda e, sizes: {
        "encoder_hidden_states": e["states"],
        "added_cond_kwargs": {"text_embeds": e["pooled"], "time_ids": sizes},
    },
    "pixart-sigma": lambda e, sizes: {"encoder_hidden_states": e["states"], "encoder_attention_mask": e["mask"]},
    "sd3": lambda e, sizes: {"encoder_hidden_states": e["states"], "pooled_projections": e["pooled"]},
    "flux1": lambda e, sizes: {
        "encoder_hidden_states": e["states"],
        "pooled_projections": e["pooled"],
        "txt_ids": e["ids"],
    },
    "sana": lambda e, sizes: {"encoder_hidden_states": e["states"], "encoder_attention_mask": e["mask"]},
    "prx": lambda e, sizes: {"encoder_hidden_states": e["states"], "attention_mask": e["mask"]},
}
"""Pipeline class → function that encodes captions for its network."""


def shifted(t: Tensor, config: ShiftConfig, tokens: int) -> Tensor:
    """Shift timesteps as in SD3's paper and FLUX.1's pipeline."""
    if config.kind == "log_linear":
        alpha = math.exp(calculate_shift(tokens))
        return alpha / (alpha + 1 / t - 1)
    assert config.kind == "constant"
    return config.factor * t / (1 + (config.factor - 1) * t)
