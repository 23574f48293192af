"""Predicted rates of the model families."""

import re

import pytest

from bench.families import MEASURED, Traced, rates, read_plan
from bench.kit.families import CONFIGS, FAMILIES, read_family
from plan.arithmetic.counted import cached_work
from shards.base.config import load_config
from train.config import TrainConfig
from train.export.pipeline import check_pipeline
from train.model.memory import GIB, StepMemory


def test_rates(shared_counts: None) -> None:
    """On 8 GPUs, a rate is that of the measured step, and a step that does not fit has none."""
    plan = read_plan("pixart-sigma", "H200")
    work = cached_work(plan.networks, [phase.bucket for phase in plan.phases])
    little, much = (StepMemory(size * GIB, 0, 0, 0, 0, 0, 0) for size in (1, 100))
    traces = [Traced([], [little, little], 2, 0), Traced([], [little, much], 2, 0)]
    first, second = rates("pixart-sigma", work, traces)
    assert first[:2] == ["pixart-sigma", "256x256"] and second[1] == "512x512"
    measured = MEASURED["pixart-sigma"][0].tflops * 1e12 / work.train["256x256"]
    found = re.fullmatch(r"([\d.]+) \(31%\)", first[6])
    assert found and float(found[1]) == pytest.approx(measured, rel=0.02)
    assert second[3] == second[5] == "does not fit"  # on 80 GB
    assert re.fullmatch(r"[\d.]+ \(3\d%\)", second[7])


# the default pipeline of Stable Diffusion 1.5 and 2 is checked only at export
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("sd15", "sd2")])
def test_random_latents_are_described_like_those_of_stage_1(family: str) -> None:
    """Otherwise training refuses them, in the GPU check too."""
    encoding = read_family(family).encoding
    for phase in (1, 2):
        check_pipeline(load_config(TrainConfig, CONFIGS / family / f"phase{phase}.yaml", [], "train"), encoding)
