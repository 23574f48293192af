"""Fixtures: the counted work of Stable Diffusion 2 base, counted only once, and plans built from the repository."""

from pathlib import Path
from typing import Protocol

import pytest

from bench.kit.roots import encoding_record
from plan.arithmetic.work import Work, build_image_tower
from plan.config import Plan
from plan.report import Report, make_report
from shards.base.config import load_config
from shards.format.towers import ONLY_TEXT

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="session", autouse=True)
def _own_counts(shared_counts: None) -> None:
    """Keep the counts of all tests here out of the user's cache."""


class MakePlan(Protocol):
    """`plan("--a.b", "value", path=…)` → the plan of that file with those overrides."""

    def __call__(self, *overrides: str, path: str = ...) -> Plan: ...


class MakeReport(Protocol):
    """Like `MakePlan`, but returns the report."""

    def __call__(self, *overrides: str, path: str = ...) -> Report: ...


SD2 = Work(
    num_parameters=865_910_724,
    train={"256x256": 3 * 181_090_467_840, "512x512": 3 * 804_257_464_320},
    backward={
        "256x256": (
            (0.0, 0.0001),
            (0.0223, 0.2074),
            (0.0836, 0.2247),
            (0.3006, 0.2136),
            (0.1874, 0.0357),
            (0.1128, 0.0185),
            (0.0719, 0.0105),
            (0.1632, 0.091),
            (0.0433, 0.0906),
            (0.0125, 0.1077),
            (0.0, 0.0001),
            (0.0024, 0.0),
        ),
        "512x512": (
            (0.0, 0.0001),
            (0.0223, 0.2457),
            (0.0836, 0.2076),
            (0.3006, 0.1888),
            (0.1874, 0.0321),
            (0.1128, 0.0152),
            (0.0719, 0.0094),
            (0.1632, 0.0795),
            (0.0433, 0.0851),
            (0.0125, 0.1363),
            (0.0, 0.0001),
            (0.0024, 0.0),
        ),
    },
    encode={"256x256": 272_722_165_760, "512x512": 1_116_658_466_816},
    caption=45_127_233_536,
    image=build_image_tower(str(REPOSITORY / "configs/vae/sd2.json"))[1],
    texts={ONLY_TEXT: encoding_record(77, 1024).texts[ONLY_TEXT]},
)


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to the repository's root, which paths in configs are relative to."""
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
    """Reports of these plans, for Stable Diffusion 2 base."""
    return lambda *overrides, path="configs/plan.yaml": make_report(plan(*overrides, path=path), SD2)
