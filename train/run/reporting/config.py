"""The `log` section of the config."""

from pydantic import Field

from shards.base.config import Config


class LogConfig(Config):
    """Metrics files, the tracker, the processes' output, and the Prometheus endpoint."""

    every: int = Field(50, ge=1)
    """Steps between lines of metrics.jsonl."""
    samples: bool = False
    """Whether to write samples.jsonl, which lists the keys of each global batch, in global order."""
    tracker: str = "tensorboard"
    """Tracker: none, or any that accelerate supports: tensorboard, wandb, mlflow, comet_ml, aim, clearml, dvclive, …"""
    project: str = "latentmill"
    """Project or experiment in the tracker; tensorboard does not use it."""
    name: str | None = None
    """Name of the run in the tracker; null: the name of the run folder."""
    tags: tuple[str, ...] = ()
    """Tags of the run in the tracker."""
    keep_output: int = Field(20, ge=0)
    """Number of launches whose output is kept in RUN/logs, with one file per process; 0: no output is kept."""
    metrics_at: str | None = Field(None, pattern=r"^[^\s:]+:\d+$")
    """HOST:PORT at which the main process serves metrics to Prometheus without a password, such as 0.0.0.0:9400; null:
    metrics are not served."""
    peak_tflops: float | None = Field(None, gt=0)
    """Peak throughput of one device in TFLOP/s, from which `mfu` is computed; null: the device's dense bfloat16 peak,
    if its name is known."""
