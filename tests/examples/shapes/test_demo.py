"""The demo's number of processes and its estimate of the total time."""

import json
import time
from pathlib import Path

import pytest

from examples.shapes.demo import Demo, seconds_left, training_processes


@pytest.mark.parametrize(("cores", "processes"), [(1, 1), (2, 2), (3, 2), (4, 4), (7, 4), (8, 8), (96, 8)])
def test_processes_share_the_batch_evenly(cores: int, processes: int) -> None:
    assert training_processes(cores) == processes


def test_the_total_time_is_estimated_once_from_the_first_logged_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    demo, metrics = Demo(tmp_path / "demo", 100), tmp_path / "metrics.jsonl"
    demo.seconds = {"world": 60.0}
    lines = [json.dumps({"step": step, "images_per_second": 139.0}) for step in (10, 20)]
    with demo.estimate(metrics):
        metrics.write_text("\n".join(lines))
        time.sleep(1.5)
    printed = capsys.readouterr().out
    minutes = round((60 + seconds_left(139.0)) / 60)
    assert printed.count("The demo will take about") == 1 and f"about {minutes} min in total (1 min so far)" in printed


def test_a_slower_machine_needs_proportionally_longer() -> None:
    assert seconds_left(10.0) == pytest.approx(10 * seconds_left(100.0))
