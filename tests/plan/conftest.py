"""Stable Diffusion 2 base as counted, so that one test alone has to count it, and plans built from the repository."""

from pathlib import Path
from typing import Protocol

import pytest

from bench.kit.roots import encoding_record
from plan.arithmetic.work import Work
from plan.config import Plan
from plan.report import Report, make_report
from shards.base.config import load_config
from shards.format.towers import ONLY_TEXT

REPOSITORY = Path(__file__).parents[2]


class MakePlan(Protocol):
    """`plan("--a.b", "value", path=…)` → the plan of that file with those overrides."""

    def __call__(self, *overrides: str, path: str = ...) -> Plan: ...


class MakeReport(Protocol):
    """As `MakePlan`, worked out."""

    def __call__(self, *overrides: str, path: str = ...) -> Report: ...


SD2 = Work(
    num_parameters=865_910_724,
    train={"256x256": 3 * 181_090_467_840, "512x512": 3 * 804_257_464_320},
    encode={"256x256": 272_722_165_760, "512x512": 1_116_658_466_816},
    caption=45_127_233_536,
    latent_hw={"256x256": (32, 32), "512x512": (64, 64)},
    latent_channels=4,
    has_posterior=True,
    texts={ONLY_TEXT: encoding_record(77, 1024).texts[ONLY_TEXT]},
)


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """Configs name files from the repository's root, where `make` runs."""
    monkeypatch.chdir(REPOSITORY)


@pytest.fixture
def sd2() -> Work:
    """The work of Stable Diffusion 2 base."""
    return SD2


@pytest.fixture
def plan() -> MakePlan:
    """Plans from the repository's configs."""
    return lambda *overrides, path="configs/plan.yaml": load_config(Plan, path, list(overrides), "plan")


@pytest.fixture
def report(plan: MakePlan) -> MakeReport:
    """Their reports, of Stable Diffusion 2 base."""
    return lambda *overrides, path="configs/plan.yaml": make_report(plan(*overrides, path=path), SD2)
