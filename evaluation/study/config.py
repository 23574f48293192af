"""Config for `python -m evaluation.study`."""

from pathlib import Path

from pydantic import Field

from evaluation.study.protocol import ProtocolConfig
from evaluation.study.serving.config import ServeConfig
from evaluation.study.statistics.power import PowerConfig
from shards.base.config import Config
from shards.base.store import Place


class StudyConfig(Config):
    """A blind study of two or more models, given by their sample sets."""

    output: Path = Path("runs/study")
    """Folder of the study, on a local disk, with its images, protocol, votes and results."""
    sets: list[Place] = Field([])
    """Sample sets drawn by `evaluation sample` with the same prompts, seed and size. They become models A, B and so
    on."""
    protocol: ProtocolConfig = ProtocolConfig()
    serve: ServeConfig = ServeConfig()
    power: PowerConfig = PowerConfig()
    partial: bool = False
    """Let `analyse` accept an incomplete study. The result is marked as partial."""
