"""The config of a study, put together from its rooms' own."""

from pathlib import Path

from pydantic import Field

from evaluation.study.protocol import ProtocolConfig
from evaluation.study.serving.config import ServeConfig
from evaluation.study.statistics.power import PowerConfig
from shards.base.config import Config
from shards.base.store import Place


class StudyConfig(Config):
    """A blind study of two or more models, by their sample sets."""

    output: Path = Path("runs/study")
    """The study's folder, on a local disk: pictures, protocol, votes, results."""
    sets: list[Place] = Field([])
    """Sample sets, as `evaluation sample` drew them, with the same prompts, seed and size: models A, B and so on."""
    protocol: ProtocolConfig = ProtocolConfig()
    serve: ServeConfig = ServeConfig()
    power: PowerConfig = PowerConfig()
    partial: bool = False
    """Of `analyse`: whether a study that is not complete may be analysed; the result says so."""
