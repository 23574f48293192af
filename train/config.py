"""The config of stage 2. Each section is defined in a module next to the code that reads it.

These modules must not import torch, so that an invalid config is rejected within a second.
"""

import math
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from shards.base.config import Config
from shards.base.device import SAFE_KERNELS, AttentionKernel, DeviceOption, PrecisionOption
from shards.base.store import Place
from train.data.spec import DataConfig
from train.model.backbone import BackboneConfig
from train.model.config import AdamWConfig, AnyOptimizer, Checkpointing, DdpConfig, EmaConfig, ScheduleConfig, Sharding
from train.objective.config import ObjectiveConfig, RepaConfig, ValidationConfig
from train.run.alarm import AlarmConfig
from train.run.checkpoints.local_copy import work_folder
from train.run.checkpoints.retention import CheckpointConfig
from train.run.reporting.config import LogConfig


class RequestConfig(Config):
    """Settings for `python -m evaluation watch`, which evaluates checkpoints. The trainer ignores them."""

    every: int | None = Field(None, ge=1)
    """Evaluate the last checkpoint and those whose step is a multiple of this number; null: all checkpoints."""


class TrainConfig(Config):
    """Stage 2: train a diffusion model on the latents of one or more buckets."""

    run_dir: Place
    """Folder or object-store URL (s3://…) for the run's config, metrics and checkpoints. An existing run is resumed."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of the initial weights, the order of samples and all random draws."""
    max_steps: int = Field(ge=1)
    """Total number of optimizer steps in the run, including the steps before it was resumed."""
    global_batch_size: int = Field(2048, ge=1)
    """Number of samples per optimizer step, summed over all processes."""
    microbatch_size: int = Field(16, ge=1)
    """Number of samples per forward pass of a process, limited to the process's share of the batch. Gradients are
    accumulated over the microbatches of a step."""
    init_from: Place | None = None
    """Run folder or URL whose newest checkpoint provides the initial weights; the optimizer state is not loaded."""
    init_weights: Literal["auto", "raw", "ema"] = "auto"
    """Weights of `init_from` to use; `auto`: the moving average if there is one, otherwise the raw weights."""
    init_unet: str | None = None
    """Folder or Hugging Face Hub name (org/repo/unet) of a pretrained diffusers network that provides the initial
    weights. The network's config must match `backbone.config`."""
    train_only: list[str] | None = Field(None, min_length=1)
    """Name patterns such as `*.attn2.*`. Only parameters whose names match a pattern are trained; all others keep their
    initial values. null: all parameters are trained."""
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
    """`auto` trains on GPUs if torch can use them, and fails if the machine has GPUs that torch cannot use; `cpu`
    always trains on the CPU."""
    precision: PrecisionOption = "auto"
    """Data type for autocast; weights and optimizer state are always float32. `auto` is bfloat16 if the hardware
    supports it and float32 otherwise; a resumed run keeps its earlier precision. `float32` does not use TF32, not even
    in convolutions."""
    gradient_checkpointing: Checkpointing = False
    """Recompute activations in the backward pass, which saves memory but takes more time. `true` recomputes those of
    all blocks. A number between 0 and 1 is the approximate share to recompute: with `compile`, torch chooses the
    activations that are cheapest to recompute, and fewer of them if the weights take more memory than all activations;
    without `compile`, that share of the blocks is recomputed."""
    compile: bool = False
    """Compile the network with torch.compile. An unsharded U-Net is compiled as a whole, any other network block by
    block."""
    sharding: Sharding = "none"
    """What is sharded across processes: `none`: nothing (DDP, in which every process holds everything); `grad_op`:
    gradients and optimizer state; `full`: weights as well."""
    sharding_group: int | None = Field(None, ge=2)
    """Number of processes across which `sharding` shards, usually the number of GPUs on a node. Each group of this size
    holds a complete copy, and gradients are averaged across groups once per step (HSDP). null: all processes."""
    ddp: DdpConfig = DdpConfig()
    collective_timeout: float = Field(600.0, gt=0)
    """Seconds that processes wait for each other in a collective before the run fails. This must exceed the time needed
    to write a checkpoint. With several processes, each process waits for storage at most 0.8 times as long."""
    takeover_after: float = Field(60.0, gt=0)
    """Seconds without a heartbeat after which the launch that holds the run is considered dead, so that a new launch
    may take over. Heartbeats are sent every second, or every 5 s if the run is at a URL, so this must be longer."""
    channels_last: bool | None = None
    """Use the channels-last memory format for convolutions; null: only on GPUs, whose bfloat16 kernels need it."""
    attention: list[AttentionKernel] = Field(list(SAFE_KERNELS))
    """Attention kernels that torch may choose from on GPUs. `math` must be one of them: it supports all inputs, but is
    slow, and its memory grows with the square of the number of tokens. A run refuses to start if a kernel returns NaN
    on its GPU for inputs that are known to provoke it, as `cudnn` does on an H200 with torch 2.11."""
    low_precision_norms: bool = False
    """Run GroupNorm and LayerNorm in the autocast data type instead of float32, which reduces memory traffic but adds
    slightly more rounding."""
    float8: bool = False
    """Multiply in float8 in linear layers that are large enough for this to save time, on GPUs with compute capability
    8.9 or higher (Ada, Hopper, Blackwell). Needs `compile`, torchao and bfloat16. Weights and all other operations keep
    their precision. Scales are per microbatch, so its size and the number of GPUs change the loss slightly."""
    num_processes: int | None = Field(None, ge=1)
    """Number of processes that the launcher must start; the run refuses to start with a different number. null: any
    number."""

    @model_validator(mode="after")
    def _check(self) -> "TrainConfig":
        if self.backbone.config is None:
            raise ValueError(
                "`backbone.config` is missing: set it to the diffusers config (JSON) of the network to train"
            )
        if self.global_batch_size % self.data.num_canonical_nodes:
            raise ValueError(
                f"global_batch_size {self.global_batch_size} is not a multiple of data.num_canonical_nodes "
                f"{self.data.num_canonical_nodes}, so the canonical nodes cannot share a global batch evenly; set "
                f"global_batch_size to a multiple of {self.data.num_canonical_nodes}, or data.num_canonical_nodes to "
                f"{math.gcd(self.global_batch_size, self.data.num_canonical_nodes)}"
            )
        if self.validation.root is not None and self.validation.every % self.log.every:
            raise ValueError(
                f"validation.every {self.validation.every} is not a multiple of log.every {self.log.every}, so "
                f"some validation results would have no line in metrics.jsonl; change one of the two settings"
            )
        if self.ema.start_step is not None and self.ema.start_step > self.max_steps:
            raise ValueError(
                f"ema.start_step {self.ema.start_step} is after the run's last step, max_steps {self.max_steps}, so "
                f"the run would end without a moving average; lower ema.start_step, or set it to null to train without "
                f"one"
            )
        if self.validation.weights == "ema" and self.ema.start_step is None:
            raise ValueError("validation.weights is ema, but the run keeps no moving average; set ema.start_step")
        if self.evaluate.every is not None and self.evaluate.every % self.checkpoint.every:
            raise ValueError(
                f"evaluate.every {self.evaluate.every} is not a multiple of checkpoint.every {self.checkpoint.every}, "
                f"so some of these steps would have no checkpoint to evaluate; change one of the two settings"
            )
        if "math" not in self.attention:
            raise ValueError("attention must contain math, because the other kernels do not support all inputs; add it")
        if self.sharding != "none" and self.precision == "float16":
            raise ValueError("sharding does not support precision float16; use bfloat16")
        if self.float8 and not self.compile:
            raise ValueError("float8 needs compile, because casting without it costs more than it saves; set both")
        if self.init_from is not None and self.init_unet is not None:
            raise ValueError("init_from and init_unet both provide the initial weights; set only one of them")
        if self.init_from is not None and work_folder(self.init_from).resolve() == self.work.resolve():
            raise ValueError(
                "init_from is the run's own run_dir; remove the init_from setting, because a run resumes by itself"
            )
        return self

    @property
    def start_timeout(self) -> float:
        """Timeout in seconds for collectives in the first steps, which is long enough for `data.first_timeout`."""
        return max(self.collective_timeout, self.data.first_timeout + self.data.timeout)

    @property
    def active_group(self) -> int | None:
        """Number of processes across which weights are sharded; None: all, or weights are not sharded."""
        return None if self.sharding == "none" else self.sharding_group

    def patience(self, seconds: float, num_processes: int) -> float:
        """Limit a timeout for storage, so that a process reports its error before the other processes' collective
        times out."""
        return seconds if num_processes == 1 else min(seconds, 0.8 * self.collective_timeout)

    @property
    def work(self) -> Path:
        """Local folder of the run: `run_dir` itself, or a temporary folder if `run_dir` is a URL."""
        return work_folder(self.run_dir)

    @property
    def network(self) -> Path:
        """Diffusers config of the network to train."""
        assert self.backbone.config is not None
        return self.backbone.config
