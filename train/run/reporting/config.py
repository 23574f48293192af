"""Config section `log`."""

from pydantic import Field

from shards.base.config import Config


class LogConfig(Config):
    """Metrics files, tracker, output of the processes, and the Prometheus endpoint."""

    every: int = Field(50, ge=1)
    """Steps between lines of metrics.jsonl."""
    samples: bool = False
    """Write samples.jsonl: the keys of each global batch, in global order."""
    tracker: str = "tensorboard"
    """none, or any tracker that accelerate supports: tensorboard, wandb, mlflow, comet_ml, aim, clearml, dvclive, …"""
    project: str = "latentmill"
    """Project or experiment in the tracker. tensorboard has none."""
    name: str | None = None
    """Name of the run in the tracker. null: name of the run folder."""
    tags: tuple[str, ...] = ()
    """Tags of the run in the tracker."""
    keep_output: int = Field(20, ge=0)
    """Number of launches whose output is kept in RUN/logs, with one file per process. 0: none."""
    metrics_at: str | None = Field(None, pattern=r"^[^\s:]+:\d+$")
    """HOST:PORT where the main process serves metrics to Prometheus (0.0.0.0:9400), without a password. null: they are
    not served."""
    peak_tflops: float | None = Field(None, gt=0)
    """Peak throughput of one device in TFLOP/s, from which `mfu` is computed. null: the dense bfloat16 peak of the
    device, if its name is known."""
