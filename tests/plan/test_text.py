"""The text form of a plan."""

from dataclasses import replace

from plan.config import ASSUMED
from plan.text import render, scaling_verdict
from tests.plan.conftest import MakeReport


def test_scaling_stops_paying(report: MakeReport) -> None:
    verdict = "Scaling stops paying off at 512 GPUs: on 1024, the speedup per doubling is 1.34x (below 1.5x),"
    assert scaling_verdict(report()).startswith(verdict)
    few = report("--gpu_counts", "[8, 16]")
    assert scaling_verdict(few) == "Scaling pays off up to 16 GPUs: the speedup per doubling is at least 1.5x."


def test_a_text_without_notes_ends_with_its_numbers(report: MakeReport) -> None:
    assert "Notes" not in render(replace(report(), notes=[]))
    assert ASSUMED.upper() in render(report())
