"""Config classes for the objective, the alignment loss and validation. This module must not import torch."""

import math
from typing import Any, Literal

from pydantic import Field, model_validator

from shards.base.config import Config
from shards.base.store import Place
from shards.format.buckets import BucketName

FLOW_ONLY = ("timestep_sampling", "weighting", "shift")
NUM_TIMESTEPS = 8


class ShiftConfig(Config):
    """Shift of the drawn timesteps toward noise, t → αt / (1 + (α − 1)·t), because larger images need more noise."""

    kind: Literal["constant", "log_linear", "square_root"] = "constant"
    """`constant`: α is `factor` (as in SD3). `log_linear`: α is e^μ, where μ is linear in an image's number of tokens
    (as in FLUX.1). `square_root`: α is `factor` · √(tokens / `base_tokens`) (Esser et al., 2024, equation 23)."""
    factor: float = Field(1.0, gt=0)
    """Factor for `constant` and `square_root`. With 1, `constant` shifts no timesteps, and `square_root` none at
    `base_tokens`."""
    base_tokens: int = Field(256, ge=1)
    """Number of tokens at which μ is `base_shift`, or at which `square_root` applies just `factor`."""
    max_tokens: int = Field(4096, ge=1)
    """Number of tokens at which μ is `max_shift`. For larger images, μ is extrapolated."""
    base_shift: float = 0.5
    """Value of μ at `base_tokens`, for `log_linear`."""
    max_shift: float = 1.15
    """Value of μ at `max_tokens`, for `log_linear`."""
    patch: int = Field(2, ge=1)
    """Side of a token's patch, in latent pixels."""

    @model_validator(mode="after")
    def _check(self) -> "ShiftConfig":
        if self.kind == "log_linear" and self.max_tokens <= self.base_tokens:
            raise ValueError(f"max_tokens {self.max_tokens} must be greater than base_tokens {self.base_tokens}")
        return self

    def alpha(self, latent_hw: tuple[int, int]) -> float:
        """Return α for images whose latents are (h, w)."""
        tokens = latent_hw[0] * latent_hw[1] // self.patch**2
        if self.kind == "constant":
            return self.factor
        if self.kind == "square_root":
            return self.factor * math.sqrt(tokens / self.base_tokens)
        slope = (self.max_shift - self.base_shift) / (self.max_tokens - self.base_tokens)
        return math.exp(self.base_shift + slope * (tokens - self.base_tokens))

    def scheduler_settings(self, latent_hw: tuple[int, int], dynamic: bool) -> dict[str, Any]:
        """Return the settings with which FlowMatchEulerDiscreteScheduler applies the same shift.

        Args:
            latent_hw: size of the latents for which to compute a shift that cannot depend on the image size.
            dynamic: whether the pipeline gives the scheduler a μ that depends on the image size.
        """
        if not dynamic or self.kind != "log_linear":
            return {"shift": self.alpha(latent_hw)}
        lengths = {"base_image_seq_len": self.base_tokens, "max_image_seq_len": self.max_tokens}
        return {"use_dynamic_shifting": True, "base_shift": self.base_shift, "max_shift": self.max_shift, **lengths}


class ObjectiveConfig(Config):
    """Prediction target and noise schedule."""

    prediction: Literal["epsilon", "v_prediction", "sample", "flow_matching"] = "epsilon"
    """Prediction target. The first three are DDPM targets, which use the β schedule; flow_matching is rectified flow,
    which has no β schedule."""
    num_train_timesteps: int = Field(1000, ge=2)
    """Number of noise steps. With flow_matching, the network receives the time in [0, 1] multiplied by this number."""
    timestep_sampling: Literal["uniform", "logit_normal", "mode", "cosmap"] = "uniform"
    """Distribution of the times for flow_matching; `logit_normal` favors the middle (Esser et al., 2024)."""
    logit_mean: float = 0.0
    """Mean of the normal distribution behind `logit_normal`."""
    logit_std: float = Field(1.0, gt=0)
    """Standard deviation of the normal distribution behind `logit_normal`."""
    mode_scale: float = Field(1.29, ge=-1, le=2 / (math.pi - 2))
    """Scale of `mode`; 0 is uniform. Within these bounds, the mapping from draws to times is one-to-one."""
    shift: ShiftConfig = ShiftConfig()
    weighting: Literal["none", "sigma_sqrt", "cosmap"] = "none"
    """Weight of each sample in the loss, for flow_matching. `sigma_sqrt`: max(t, 1/num_train_timesteps)^−2; without
    this bound, t^−2 would have an infinite mean over uniform times. `cosmap`: 2 / (π·(1 − 2t + 2t²)), the density of
    cosmap."""
    beta_schedule: Literal["scaled_linear", "linear", "squaredcos_cap_v2"] = "scaled_linear"
    """Schedule of β from `beta_start` to `beta_end`, as named in diffusers."""
    beta_start: float = Field(0.00085, gt=0, lt=1)
    """Variance of the first noise step."""
    beta_end: float = Field(0.012, gt=0, lt=1)
    """Variance of the last noise step."""
    caption_dropout: float = Field(0.1, ge=0, le=1)
    """Fraction of samples whose caption is replaced by the empty caption, for classifier-free guidance."""
    min_snr_gamma: float | None = Field(None, gt=0)
    """γ of the min-SNR weights, which weight each sample's squared error in the latents by min(SNR, γ) (Hang et al.,
    2023); null: no weighting. With zero_terminal_snr, the weight is min(SNR + 1, γ), because min(SNR, γ) is 0 at the
    last timestep, which would then never be trained."""
    offset_noise: float = Field(0.0, ge=0)
    """Scale of an additional random value that is drawn per channel and added to the noise at every position."""
    zero_terminal_snr: bool = False
    """Rescale the schedule so that its last step is pure noise (Lin et al., 2023). This does not work with epsilon."""

    @model_validator(mode="after")
    def _check(self) -> "ObjectiveConfig":
        if self.prediction == "flow_matching":
            for name in ("zero_terminal_snr", "min_snr_gamma", "offset_noise"):
                if getattr(self, name):
                    raise ValueError(
                        f"{name} does not apply to prediction flow_matching: its path already ends in pure noise, and "
                        f"its loss has no SNR weights; remove {name}"
                    )
            return self
        for name in FLOW_ONLY:
            value = getattr(self, name)
            if value != type(self).model_fields[name].default:
                shown = f"{name}.kind {value.kind}" if isinstance(value, ShiftConfig) else f"{name} {value}"
                raise ValueError(
                    f"{shown} applies only to prediction flow_matching; remove {name} or change prediction"
                )
        if self.zero_terminal_snr and self.prediction == "epsilon":
            raise ValueError(
                "with zero_terminal_snr, a network that predicts epsilon has nothing to learn at the last timestep; "
                "set `prediction` to v_prediction"
            )
        return self


class RepaConfig(Config):
    """An additional loss that aligns a hidden layer with a feature tower of the root (REPA)."""

    layer: str | None = None
    """Name of the network's module to align, such as down_blocks.1 or transformer_blocks.7; null: no alignment."""
    output: int = Field(0, ge=0)
    """Index of the output to align, if the module has several: 0 for U-Net blocks, 1 if the text output comes first."""
    tower: str | None = None
    """Name of the feature tower; null: the only feature tower that the run reads."""
    weight: float = Field(0.5, gt=0)
    """Coefficient λ of the alignment loss."""
    schedule: Literal["constant", "linear"] = "constant"
    """`constant`: λ until `until`, then 0. `linear`: a linear decay to 0 at `until`."""
    until: int | None = Field(None, ge=1)
    """Step at which the alignment ends; null: never."""
    hidden: int = Field(2048, ge=1)
    """Width of the projection head, which is three linear layers with SiLU activations."""

    @model_validator(mode="after")
    def _check(self) -> "RepaConfig":
        if self.schedule == "linear" and self.until is None:
            raise ValueError("the linear schedule needs `until`, the step at which the alignment ends")
        return self

    def coefficient(self, step: int) -> float:
        """Return the coefficient of the alignment loss at optimizer step `step`, counted from 0."""
        if self.until is None:
            return self.weight
        left = max(0.0, 1.0 - step / self.until)
        return self.weight * left if self.schedule == "linear" else self.weight * (left > 0)


class ValidationConfig(Config):
    """Loss on held-out samples from a root that was encoded like the training data."""

    root: Place | None = None
    """Latents root with the held-out samples, a folder or an object-store URL; null: no validation."""
    bucket: BucketName = "256x256"
    """Bucket to validate on, WIDTHxHEIGHT in pixels."""
    samples: int = Field(1024, ge=1)
    """Number of samples. The first samples in the bucket that are not on the root's exclusion lists are used. As with
    the training data, a run keeps the index and exclusions that it started with, unless it is resumed with
    `data.index: newest`."""
    batch_size: int = Field(64, ge=1)
    """Number of samples per forward pass."""
    every: int = Field(1000, ge=1)
    """Steps between validations. The result is part of a line in metrics.jsonl, so this must be a multiple of
    `log.every`."""
    timesteps: Literal["middles", "starts"] = "middles"
    """Timesteps to evaluate: the middles or the starts of eight equal parts of the time axis. With flow matching, the
    starts are t = k/8, the timesteps of MLPerf's FLUX.1 benchmark."""
    dealt: bool = False
    """Evaluate each sample at only one of the eight timesteps, which are assigned to samples in turn, as MLPerf does;
    false: evaluate it at all eight, at eight times the cost."""
    weights: Literal["raw", "ema"] = "raw"
    """Weights to validate; `ema` swaps in the moving average during validation, once it exists."""

    @model_validator(mode="after")
    def _check(self) -> "ValidationConfig":
        if self.dealt and self.samples < NUM_TIMESTEPS:
            raise ValueError(
                f"`dealt` spreads the samples over {NUM_TIMESTEPS} timesteps, so samples must be at least "
                f"{NUM_TIMESTEPS}, but samples is {self.samples}"
            )
        return self
