"""What a run is asked to say."""

from pydantic import Field

from shards.base.config import Config


class LogConfig(Config):
    """What the run says of itself."""

    every: int = Field(50, ge=1)
    """Steps between lines of metrics.jsonl."""
    samples: bool = False
    """Write samples.jsonl: the keys of each global batch, in global order."""
    tracker: str = "tensorboard"
    """none, or one that accelerate knows: tensorboard, wandb, mlflow, comet_ml, aim, clearml, dvclive, …"""
    project: str = "latentmill"
    """The tracker's project, or experiment; tensorboard has none."""
    name: str | None = None
    """The run's name in the tracker; null: the run folder's."""
    tags: tuple[str, ...] = ()
    """Of the run in the tracker."""
    keep_output: int = Field(20, ge=0)
    """Launches of which it is kept what each process printed, in RUN/logs; 0: none."""
    metrics_at: str | None = Field(None, pattern=r"^[^\s:]+:\d+$")
    """HOST:PORT at which the main process serves figures to Prometheus (0.0.0.0:9400); null: nowhere. Whoever reaches
    it may read them."""
    peak_tflops: float | None = Field(None, gt=0)
    """What one device does at most, in TFLOP/s, for `mfu`; null: bfloat16's by the device's name, where it is known."""
