"""The config of stage 2, one section per concern."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from shards.base.config import Config
from shards.base.store import Place
from shards.format.buckets import Bucket
from train.data.selection import FilterConfig

Precision = Literal["float32", "float16", "bfloat16"]
Sharding = Literal["none", "grad_op", "full"]


class StreamConfig(Config):
    """One bucket of one latents root."""

    root: Place
    """The latents root that stage 1 wrote: a folder, or an address such as s3://bucket/latents."""
    bucket: str
    """WIDTHxHEIGHT in pixels."""
    weight: float = Field(1.0, gt=0, le=10_000)
    """Passes over the samples that pass the filter, per epoch."""
    filter: FilterConfig | None = None
    """Which samples; in place of data.filter."""
    cache: Path | None = None
    """Local folder for copies of its files; in place of data.cache."""

    @field_validator("bucket")
    @classmethod
    def _parse_bucket(cls, name: str) -> str:
        return str(Bucket.parse(name))


class DataConfig(Config):
    """What is read, and in which order."""

    streams: list[StreamConfig] = Field(min_length=1)
    num_workers: int = Field(8, ge=0)
    """Loader processes per rank; the order of samples does not depend on it."""
    num_canonical_nodes: int = Field(64, ge=1)
    """Slices into which an epoch's order is cut, on any number of nodes; divides the global batch."""
    shuffle: bool = True
    shuffle_block: int = Field(32768, ge=1)
    """Samples of a slice that are shuffled together; a global batch mixes a block of every slice."""
    filter: FilterConfig | None = None
    """Which samples of every stream to train on, by their stored scores and sizes."""
    cache: Path | None = None
    """Local folder for copies of remote files, which are then read from there; a local root is copied too."""
    cache_limit: int | None = Field(None, ge=1)
    """Bytes of all copies in one cache folder; null: no limit."""
    timeout: float = Field(300.0, gt=0)
    """Seconds to wait for a batch before the run stops with an error."""
    first_timeout: float = Field(1800.0, gt=0)
    """The same for each loader process's first batch: until then a machine fetches and hashes a good part of a block of
    every slice. Other processes wait for the slowest only for `collective_timeout`."""


class ObjectiveConfig(Config):
    """What the U-Net learns to predict, under which noise."""

    prediction: Literal["epsilon", "v_prediction", "sample", "flow_matching"] = "epsilon"
    """The first three are DDPM's, over the β below; flow_matching is rectified flow, which has no β."""
    num_train_timesteps: int = Field(1000, ge=1)
    """With flow_matching, the scale on which the U-Net is told the time in [0, 1]."""
    timestep_sampling: Literal["uniform", "logit_normal"] = "uniform"
    """How flow_matching draws its time; the sigmoid of a normal dwells in the middle (Esser et al., 2024)."""
    logit_mean: float = 0.0
    logit_std: float = Field(1.0, gt=0)
    beta_schedule: Literal["scaled_linear", "linear", "squaredcos_cap_v2"] = "scaled_linear"
    beta_start: float = Field(0.00085, gt=0, lt=1)
    beta_end: float = Field(0.012, gt=0, lt=1)
    caption_dropout: float = Field(0.1, ge=0, le=1)
    """Share of samples that see the empty caption, for classifier-free guidance."""
    min_snr_gamma: float | None = Field(None, gt=0)
    """Weigh each sample's loss by min(SNR, γ) (Hang et al., 2023); null: all alike. With zero_terminal_snr the last
    step, whose SNR is 0, then has weight 0."""
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
        elif self.timestep_sampling != "uniform":
            raise ValueError(f"timestep_sampling {self.timestep_sampling} goes with prediction flow_matching alone")
        if self.zero_terminal_snr and self.prediction == "epsilon":
            raise ValueError(
                "zero_terminal_snr with prediction epsilon has nothing to learn at the last step; use v_prediction"
            )
        return self


Momentum = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Config):
    """AdamW, and the clip before it."""

    lr: float = Field(1e-4, gt=0)
    betas: tuple[Momentum, Momentum] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.01, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    max_skipped_steps: int = Field(100, ge=0)
    """A step whose gradient is not finite leaves weights and optimizer alone and is counted; more stop the run."""


class ScheduleConfig(Config):
    """The learning rate over the steps."""

    kind: Literal["constant", "cosine"] = "constant"
    """After warm-up: as it is, or half a cosine down to zero at `max_steps`."""
    warmup_steps: int = Field(10_000, ge=0)
    """Linear from zero."""


class EmaConfig(Config):
    """The exponential moving average of the weights."""

    kind: Literal["constant", "power"] = "constant"
    """`power` widens the average with the run, to the same share of it at every step (Karras et al., 2024)."""
    decay: float = Field(0.9999, gt=0, lt=1)
    """Of `constant`."""
    sigma_rel: float = Field(0.1, gt=0, lt=0.28)
    """Of `power`: the average's width (standard deviation in time) as a share of the steps done."""
    start_step: int | None = Field(None, ge=0)
    """Step from which it is held; null: never. It takes no memory before."""


class CheckpointConfig(Config):
    """When the run is saved."""

    every: int = Field(1000, ge=1)
    """Steps; the last step is always saved."""
    keep: int = Field(3, ge=1)
    """How many of the newest checkpoints are kept."""
    keep_every: int | None = Field(None, ge=1)
    """Checkpoints of steps that this divides are kept for good."""
    asynchronous: bool = False
    """Copy what is to be saved to the CPU's memory, and write it while training goes on; one at a time."""
    tag: str | None = None
    """The phase's name, in the checkpoint and in messages; null: the run folder's name."""


class LogConfig(Config):
    """What the run says of itself."""

    every: int = Field(50, ge=1)
    """Steps between lines of metrics.jsonl."""
    samples: bool = False
    """Write samples.jsonl: the keys of each global batch, in global order."""
    tracker: str = "tensorboard"
    """none, or one that accelerate knows: tensorboard, wandb, mlflow, comet_ml, aim, clearml, dvclive, …"""
    peak_tflops: float | None = Field(None, gt=0)
    """What one device does at most, in TFLOP/s, for `mfu`; null: bfloat16's by the device's name, where it is known."""


class ValidationConfig(Config):
    """Held-out samples whose loss is taken now and then; a root of its own, encoded as the training data is."""

    root: Place | None = None
    """The latents root, a folder or an address; null: no validation."""
    bucket: str = "256x256"
    samples: int = Field(1024, ge=1)
    """How many, from the root's first on."""
    batch_size: int = Field(64, ge=1)
    every: int = Field(1000, ge=1)
    """Steps; the value goes with that step's line of metrics.jsonl, so `log.every` must divide it."""


class TrainConfig(Config):
    """Stage 2: train a U-Net on the latents of one or more buckets."""

    run_dir: Path
    seed: int = Field(0, ge=0, lt=2**32)
    max_steps: int = Field(ge=1)
    """Optimizer steps of the whole run, resumed parts included."""
    global_batch_size: int = Field(2048, ge=1)
    """Samples per optimizer step over all processes."""
    microbatch_size: int = Field(16, ge=1)
    """Samples per forward pass of one process; gradients are accumulated over the rest of its share."""
    init_from: Path | None = None
    """A run folder whose newest checkpoint this run starts from, with a new optimizer."""
    init_weights: Literal["auto", "raw", "ema"] = "auto"
    """Which of its weights; auto: the moving average where it has one."""
    init_unet: str | None = None
    """A folder of a pretrained diffusers U-Net, or its hub name (org/repo/unet), to start from; of `unet`'s config."""
    data: DataConfig
    unet: Path
    """A diffusers UNet2DConditionModel config (JSON)."""
    objective: ObjectiveConfig = ObjectiveConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    ema: EmaConfig = EmaConfig()
    validation: ValidationConfig = ValidationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    precision: Precision = "bfloat16"
    """Autocast type; weights and optimizer are float32."""
    gradient_checkpointing: bool = False
    compile: bool = False
    """torch.compile the U-Net."""
    sharding: Sharding = "none"
    """Over several processes: each holds all (DDP), parts of gradients and optimizer state, or of the weights too."""
    collective_timeout: float = Field(600.0, gt=0)
    """Seconds after which a process that does not answer the others ends the run; longer than writing a checkpoint."""
    channels_last: bool | None = None
    """Memory format of the convolutions; null: on GPUs, whose bfloat16 kernels want it."""
    low_precision_norms: bool = False
    """Run GroupNorm and LayerNorm in the autocast type, not in float32: less memory traffic, a little more rounding."""
    num_processes: int | None = Field(None, ge=1)
    """How many processes the launcher was asked for; the run refuses to start on another number."""

    @model_validator(mode="after")
    def _check(self) -> "TrainConfig":
        if self.global_batch_size % self.data.num_canonical_nodes:
            raise ValueError(
                f"global_batch_size {self.global_batch_size} is not a multiple of data.num_canonical_nodes "
                f"{self.data.num_canonical_nodes}, whose spans share each global batch evenly"
            )
        if self.validation.root is not None and self.validation.every % self.log.every:
            raise ValueError(
                f"validation.every {self.validation.every} is not a multiple of log.every {self.log.every}, so there "
                f"would be no line for its value"
            )
        if self.sharding != "none" and self.precision == "float16":
            raise ValueError("sharding with precision float16 needs a loss scaler of its own; use bfloat16")
        if self.init_from is not None and self.init_unet is not None:
            raise ValueError("init_from and init_unet are two starts; give one")
        if self.init_from is not None and self.init_from.resolve() == self.run_dir.resolve():
            raise ValueError("init_from is the run's own run_dir; resuming needs no init_from")
        return self
