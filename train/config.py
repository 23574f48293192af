"""The config of stage 2. Each section's model stands beside the code that reads it, or in `config.py` of its folder:
no module that a config is made of imports torch, so that a wrong request is refused at once."""

import math
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from shards.base.config import Config
from shards.base.device import DeviceOption, PrecisionOption
from shards.base.store import Place
from train.data.spec import DataConfig
from train.model.backbone import BackboneConfig
from train.model.config import AdamWConfig, AnyOptimizer, DdpConfig, EmaConfig, ScheduleConfig, Sharding
from train.objective.config import ObjectiveConfig, RepaConfig, ValidationConfig
from train.run.alarm import AlarmConfig
from train.run.saving.config import CheckpointConfig
from train.run.saving.local_copy import work_folder
from train.run.telling.config import LogConfig


class RequestConfig(Config):
    """What the run asks of `python -m evaluation watch`; the trainer itself evaluates nothing."""

    every: int | None = Field(None, ge=1)
    """Checkpoints of steps that this divides are to be evaluated, and the last; null: all."""


class TrainConfig(Config):
    """Stage 2: train a U-Net on the latents of one or more buckets."""

    run_dir: Place
    """The run folder, or its address (s3://…): config, metrics, checkpoints. A run that it holds is resumed."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Of the first weights, the order of samples and every draw."""
    max_steps: int = Field(ge=1)
    """Optimizer steps of the whole run, those before a resume included."""
    global_batch_size: int = Field(2048, ge=1)
    """Samples per optimizer step over all processes."""
    microbatch_size: int = Field(16, ge=1)
    """Samples per forward pass of one process, at most its share of the batch; gradients are accumulated over the
    rest of the share."""
    init_from: Place | None = None
    """A run folder, or its address, whose newest checkpoint this run starts from, with a new optimizer."""
    init_weights: Literal["auto", "raw", "ema"] = "auto"
    """Which of its weights; auto: the moving average where it has one."""
    init_unet: str | None = None
    """A folder of a pretrained diffusers U-Net, or its hub name (org/repo/unet), to start from. Its config must be that
    of `backbone.config`."""
    train_only: list[str] | None = Field(None, min_length=1)
    """Patterns such as `*.attn2.*`: only the network's parameters whose names match one are trained, and the others
    keep the weights that the run starts with; null: all are trained."""
    data: DataConfig
    backbone: BackboneConfig = BackboneConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    repa: RepaConfig = RepaConfig()
    optimizer: AnyOptimizer = AdamWConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    ema: EmaConfig = EmaConfig()
    validation: ValidationConfig = ValidationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    alarm: AlarmConfig = AlarmConfig()
    evaluate: RequestConfig = RequestConfig()
    device: DeviceOption = "auto"
    """`auto` trains on the GPUs if torch can use them, and stops if there are GPUs that it cannot use; `cpu` trains on
    the CPU in any case."""
    precision: PrecisionOption = "auto"
    """Autocast type; weights and optimizer are float32. `auto` is bfloat16 where the hardware supports it and float32
    elsewhere; a resumed run keeps what it began with. `float32` is without TF32, also in convolutions."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass: less memory, more time."""
    compile: bool = False
    """torch.compile the U-Net."""
    sharding: Sharding = "none"
    """Over several processes: each holds all (DDP), shares of gradients and optimizer state, or of the weights too."""
    ddp: DdpConfig = DdpConfig()
    collective_timeout: float = Field(600.0, gt=0)
    """Seconds after which a process that does not answer the others ends the run; longer than writing a checkpoint.
    Of several processes each waits for its storage at most 0.8 of it."""
    takeover_after: float = Field(60.0, gt=0)
    """Seconds without a sign of life after which a launch that may still hold the run folder counts as dead."""
    channels_last: bool | None = None
    """Memory format of the convolutions; null: on GPUs, whose bfloat16 kernels want it."""
    low_precision_norms: bool = False
    """Run GroupNorm and LayerNorm in the autocast type, not in float32: less memory traffic, a little more rounding."""
    num_processes: int | None = Field(None, ge=1)
    """How many processes the launcher was asked for; the run refuses to start on another number."""

    @model_validator(mode="after")
    def _check(self) -> "TrainConfig":
        if self.backbone.config is None:
            raise ValueError("`backbone.config` is missing: give the diffusers config (JSON) of the network to train")
        if self.global_batch_size % self.data.num_canonical_nodes:
            raise ValueError(
                f"global_batch_size {self.global_batch_size} is not a multiple of data.num_canonical_nodes "
                f"{self.data.num_canonical_nodes}, whose spans share each global batch evenly; give a "
                f"multiple of it, or set data.num_canonical_nodes to "
                f"{math.gcd(self.global_batch_size, self.data.num_canonical_nodes)}"
            )
        if self.validation.root is not None and self.validation.every % self.log.every:
            raise ValueError(
                f"validation.every {self.validation.every} is not a multiple of log.every {self.log.every}, so there "
                f"would be no line for its value"
            )
        if self.validation.weights == "ema" and self.ema.start_step is None:
            raise ValueError("validation.weights ema has no average to read: set ema.start_step")
        if self.evaluate.every is not None and self.evaluate.every % self.checkpoint.every:
            raise ValueError(
                f"evaluate.every {self.evaluate.every} is not a multiple of checkpoint.every {self.checkpoint.every}, "
                f"so there would be no checkpoint to evaluate"
            )
        if self.sharding != "none" and self.precision == "float16":
            raise ValueError("sharding with precision float16 needs a loss scaler of its own; use bfloat16")
        if self.init_from is not None and self.init_unet is not None:
            raise ValueError("init_from and init_unet are two starts; give one")
        if self.init_from is not None and work_folder(self.init_from).resolve() == self.work.resolve():
            raise ValueError("init_from is the run's own run_dir; resuming needs no init_from")
        return self

    @property
    def start_timeout(self) -> float:
        """Seconds that collectives may take in the first steps, whose batches may take `data.first_timeout`."""
        return max(self.collective_timeout, self.data.first_timeout + self.data.timeout)

    def patience(self, seconds: float, num_processes: int) -> float:
        """What a process waits for storage at most: less than the others wait for it, so that it can say why."""
        return seconds if num_processes == 1 else min(seconds, 0.8 * self.collective_timeout)

    @property
    def work(self) -> Path:
        """Where this machine has the run: `run_dir`, or a temporary folder for one at an address."""
        return work_folder(self.run_dir)

    @property
    def network(self) -> Path:
        """The diffusers config of the network to train."""
        assert self.backbone.config is not None
        return self.backbone.config
