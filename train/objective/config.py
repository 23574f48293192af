"""Config of the objective, the alignment loss and validation, without torch: it is read first."""

import math
from typing import Any, Literal

from pydantic import Field, model_validator

from shards.base.config import Config
from shards.base.store import Place
from shards.format.buckets import BucketName

FLOW_ONLY = ("timestep_sampling", "weighting", "shift")
NUM_TIMESTEPS = 8


class ShiftConfig(Config):
    """Moves the drawn times towards noise, t → αt / (1 + (α − 1)·t): larger pictures need more of it to be hidden."""

    kind: Literal["constant", "log_linear", "square_root"] = "constant"
    """α is `factor` for all (SD3); or e^μ, with μ linear in a picture's tokens (FLUX.1); or `factor` times the root of
    the tokens over `base_tokens` (equation 23)."""
    factor: float = Field(1.0, gt=0)
    """Of `constant` and `square_root`; 1 leaves the times of the base size as they are."""
    base_tokens: int = Field(256, ge=1)
    """Tokens at which μ is `base_shift`."""
    max_tokens: int = Field(4096, ge=1)
    """Tokens at which μ is `max_shift`; beyond, the line goes on."""
    base_shift: float = 0.5
    """Of `log_linear`."""
    max_shift: float = 1.15
    """Of the same."""
    patch: int = Field(2, ge=1)
    """A token is so many latents wide and high."""

    @model_validator(mode="after")
    def _check(self) -> "ShiftConfig":
        if self.kind == "log_linear" and self.max_tokens <= self.base_tokens:
            raise ValueError(f"max_tokens {self.max_tokens} is not above base_tokens {self.base_tokens}")
        return self

    def alpha(self, latent_hw: tuple[int, int]) -> float:
        """α of pictures whose latents are (h, w)."""
        tokens = latent_hw[0] * latent_hw[1] // self.patch**2
        if self.kind == "constant":
            return self.factor
        if self.kind == "square_root":
            return self.factor * math.sqrt(tokens / self.base_tokens)
        slope = (self.max_shift - self.base_shift) / (self.max_tokens - self.base_tokens)
        return math.exp(self.base_shift + slope * (tokens - self.base_tokens))

    def scheduler_settings(self, scheduler: str, latent_hw: tuple[int, int]) -> dict[str, Any]:
        """Fields by which a diffusers scheduler of this class steps where training's times were moved to.

        Where a scheduler cannot follow the picture's size, as pictures of the latents (h, w) ask for.
        """
        if scheduler == "DPMSolverMultistepScheduler":
            return {"flow_shift": self.alpha(latent_hw)}
        if scheduler != "FlowMatchEulerDiscreteScheduler":
            return {}
        if self.kind != "log_linear":
            return {"shift": self.alpha(latent_hw)}
        lengths = {"base_image_seq_len": self.base_tokens, "max_image_seq_len": self.max_tokens}
        return {"use_dynamic_shifting": True, "base_shift": self.base_shift, "max_shift": self.max_shift, **lengths}


class ObjectiveConfig(Config):
    """What the U-Net learns to predict, under which noise."""

    prediction: Literal["epsilon", "v_prediction", "sample", "flow_matching"] = "epsilon"
    """The first three are DDPM's, over the β below; flow_matching is rectified flow, which has no β."""
    num_train_timesteps: int = Field(1000, ge=1)
    """With flow_matching, the scale on which the U-Net is told the time in [0, 1]."""
    timestep_sampling: Literal["uniform", "logit_normal", "mode", "cosmap"] = "uniform"
    """How flow_matching draws its time; the sigmoid of a normal dwells in the middle (Esser et al., 2024)."""
    logit_mean: float = 0.0
    """Of the normal of logit_normal."""
    logit_std: float = Field(1.0, gt=0)
    """Of the same."""
    mode_scale: float = Field(1.29, ge=-1, le=2 / (math.pi - 2))
    """Of mode; 0 is uniform, and within these bounds no two draws give one time."""
    shift: ShiftConfig = ShiftConfig()
    weighting: Literal["none", "sigma_sqrt", "cosmap"] = "none"
    """With flow_matching, each sample's weight in the loss: max(t, 1/num_train_timesteps)^−2, or
    2 / (π·(1 − 2t + 2t²)), the density of cosmap. Without the limit t^−2 has an infinite mean over uniform times; at
    1/1000 diffusers' training scripts have their smallest time."""
    beta_schedule: Literal["scaled_linear", "linear", "squaredcos_cap_v2"] = "scaled_linear"
    """How β goes from `beta_start` to `beta_end`, as diffusers names it."""
    beta_start: float = Field(0.00085, gt=0, lt=1)
    """Variance of the first noise step."""
    beta_end: float = Field(0.012, gt=0, lt=1)
    """Variance of the last."""
    caption_dropout: float = Field(0.1, ge=0, le=1)
    """Share of samples that see the empty caption, for classifier-free guidance."""
    min_snr_gamma: float | None = Field(None, gt=0)
    """Weigh each sample's loss by min(SNR, γ) in terms of the latents (Hang et al., 2023); null: all alike. With
    zero_terminal_snr the weight is min(SNR + 1, γ), because min(SNR, γ) is 0 at the last timestep, which would then
    never be trained."""
    offset_noise: float = Field(0.0, ge=0)
    """Size of a further draw per channel, the same over the picture, added to the noise."""
    zero_terminal_snr: bool = False
    """Rescale the schedule so that its last step is pure noise (Lin et al., 2023); not with epsilon."""

    @model_validator(mode="after")
    def _check(self) -> "ObjectiveConfig":
        if self.prediction == "flow_matching":
            for name in ("zero_terminal_snr", "min_snr_gamma", "offset_noise"):
                if getattr(self, name):
                    raise ValueError(
                        f"{name} with prediction flow_matching: that path ends in pure noise by itself and has no SNR "
                        f"weights; leave it out"
                    )
            return self
        for name in FLOW_ONLY:
            value = getattr(self, name)
            if value != type(self).model_fields[name].default:
                shown = f"{name}.kind {value.kind}" if isinstance(value, ShiftConfig) else f"{name} {value}"
                raise ValueError(f"{shown} goes with prediction flow_matching alone")
        if self.zero_terminal_snr and self.prediction == "epsilon":
            raise ValueError(
                "zero_terminal_snr with prediction epsilon has nothing to learn at the last step; use v_prediction"
            )
        return self


class RepaConfig(Config):
    """An alignment loss of a hidden layer with a feature tower of the root, beside the loss (REPA)."""

    layer: str | None = None
    """Module of the network by its name, such as down_blocks.1 or transformer_blocks.7; null: no alignment."""
    output: int = Field(0, ge=0)
    """Which of its outputs, where it has several: 0 of a U-Net's blocks, 1 of blocks that give text, then image."""
    tower: str | None = None
    """Name of the feature tower; null: the one that is read."""
    weight: float = Field(0.5, gt=0)
    """λ, the loss's coefficient."""
    schedule: Literal["constant", "linear"] = "constant"
    """λ up to `until`, and 0 from there; or falling to 0 there in a line."""
    until: int | None = Field(None, ge=1)
    """Step; null: λ for good."""
    hidden: int = Field(2048, ge=1)
    """Width of the projection head, three linear layers with SiLU between."""

    @model_validator(mode="after")
    def _check(self) -> "RepaConfig":
        if self.schedule == "linear" and self.until is None:
            raise ValueError("schedule linear needs `until`, the step at which it ends")
        return self

    def coefficient(self, step: int) -> float:
        """λ of optimizer step `step` (the first is 0)."""
        if self.until is None:
            return self.weight
        left = max(0.0, 1.0 - step / self.until)
        return self.weight * left if self.schedule == "linear" else self.weight * (left > 0)


class ValidationConfig(Config):
    """Held-out samples whose loss is taken now and then; a root of its own, encoded as the training data is."""

    root: Place | None = None
    """The latents root, a folder or an address; null: no validation."""
    bucket: BucketName = "256x256"
    """WIDTHxHEIGHT in pixels."""
    samples: int = Field(1024, ge=1)
    """Number of samples: the first ones of the bucket that no exclusion list of the root names. As for the training
    data, a run keeps the index and exclusions that it began with, unless it is resumed with `data.index: newest`."""
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
