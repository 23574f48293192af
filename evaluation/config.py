"""Config for `python -m evaluation`, assembled from the sections that the subpackages define."""

from pydantic import Field
from pydantic_settings import CliSuppress

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
    """Sample a model and score its images."""

    model: str = Field(min_length=1)
    """Model to sample: a run folder or its URL, the folder of an exported diffusers pipeline, or the name of a pipeline
    on the Hub."""
    step: int | None = Field(None, ge=0)
    """Step of the run's checkpoint. null: the newest checkpoint."""
    weights: Weights = "auto"
    """Weights to use from the run's checkpoint: `raw`, `ema` (the moving average), or `auto`, which means `ema` if the
    checkpoint has it and `raw` otherwise."""
    trust_remote_code: bool = False
    """Allow workers to execute Python code found in the pipeline's folder."""
    output: Place | None = None
    """Folder (visible to all workers) or URL for images and metrics. null: RUN/evaluations/STEP."""
    prompts: PromptsConfig = PromptsConfig()
    sampling: SamplingConfig = SamplingConfig()
    extractors: ExtractorsConfig = ExtractorsConfig()
    reference: ReferenceConfig = ReferenceConfig()
    metrics: list[MetricName] | None = None
    """Metrics to compute. null: all metrics whose extractor has weights."""
    workers: FleetConfig = FleetConfig()


class WatchConfig(EvaluateConfig, FollowConfig):
    """Sample and score a run's checkpoints as they appear."""

    step: CliSuppress[int | None] = Field(None, ge=0)
    """Not accepted, because `watch` evaluates many checkpoints. Select them with `every` and `until`."""
    output: Place | None = None
    """Folder or URL for evaluations/ and evaluations.jsonl. null: the run folder."""
