"""The config of evaluation, put together from its rooms' own."""

from pydantic import Field

from cluster.fleet import FleetConfig
from evaluation.features.extractors import ExtractorsConfig
from evaluation.features.sources import ReferenceConfig
from evaluation.metrics.table import MetricName
from evaluation.sampling.model import Weights
from evaluation.sampling.prompts import PromptsConfig
from evaluation.sampling.settings import SamplingConfig
from evaluation.watch.follow import FollowConfig
from shards.base.config import Config
from shards.base.store import Place


class EvaluateConfig(Config):
    """Pictures of a model, and metrics over them."""

    model: str
    """A run folder or its address; or a diffusers pipeline: an export's folder, or a name on the hub."""
    step: int | None = Field(None, ge=0)
    """Of a run: which checkpoint; null: the newest."""
    weights: Weights = "auto"
    """Of a run: raw, ema, or auto, the moving average where there is one."""
    trust_remote_code: bool = False
    """Allow workers to execute Python code that the pipeline's folder contains."""
    output: Place | None = None
    """Where samples and metrics go, a folder that all workers see or an address; null: RUN/evaluations/STEP."""
    prompts: PromptsConfig = PromptsConfig()
    sampling: SamplingConfig = SamplingConfig()
    extractors: ExtractorsConfig = ExtractorsConfig()
    reference: ReferenceConfig = ReferenceConfig()
    metrics: list[MetricName] | None = None
    """Which; null: all whose extractor's weights are given."""
    workers: FleetConfig = FleetConfig()


class WatchConfig(EvaluateConfig, FollowConfig):
    """Follow a run, and evaluate its checkpoints as they appear."""

    output: Place | None = None
    """Where evaluations/ and evaluations.jsonl go; null: into the run folder."""
