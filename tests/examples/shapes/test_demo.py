"""The demo's progress and estimate, what it does after a failure, and the order of its images."""

import tarfile
import time
import urllib.request
from datetime import datetime
from pathlib import Path

import pytest

from evaluation.config import EvaluateConfig
from examples.shapes.demo import CONFIGS, Demo
from examples.shapes.progress import Progress, Step, describe, seconds_left
from precompute.config import PrecomputeConfig
from precompute.download.__main__ import run as download
from shards.base.config import Config, load_config
from train.config import TrainConfig

STEPS = [
    Step("encode", "encode", 60, "data", lambda: None),
    Step("first", "first phase", 100, "training", lambda: None),
    Step("second", "second phase", 200, "training", lambda: None),
]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("precompute", PrecomputeConfig), ("phase1", TrainConfig), ("phase2", TrainConfig), ("evaluate", EvaluateConfig)],
)
def test_its_configs_are_valid(name: str, kind: type[Config]) -> None:
    load_config(kind, CONFIGS / f"{name}.yaml", [], "demo")


def test_the_estimate_follows_the_speed_of_steps_of_the_same_kind() -> None:
    assert seconds_left(STEPS, {}, {}) == pytest.approx(360)
    # twice as slow as expected in all that is known
    slow = seconds_left(STEPS, {"encode": 120.0}, {"encode": 1.0})
    assert slow == pytest.approx(300 * (120 + 20) / (60 + 20))
    # encoding was slow, but training is fast
    halfway = seconds_left(STEPS, {"encode": 120.0, "first": 25.0}, {"encode": 1.0, "first": 0.5})
    assert 100 < halfway < 250
    names = [step.name for step in STEPS]
    assert seconds_left(STEPS, dict.fromkeys(names, 9.0), dict.fromkeys(names, 1.0)) == 0


def test_a_process_that_has_only_started_does_not_disturb_the_estimate() -> None:
    before = seconds_left(STEPS, {"encode": 60.0}, {"encode": 1.0})
    started = seconds_left(STEPS, {"encode": 60.0, "first": 12.0}, {"encode": 1.0, "first": 0.02})
    assert before == pytest.approx(300) and started < 1.6 * before


def test_the_finish_is_described_in_minutes() -> None:
    noon = datetime(2026, 11, 26, 12)
    assert describe(250, noon) == "about 4 min left, until 12:04"
    assert describe(20, noon) == "about half a minute left, until 12:00"


def test_plain_lines_tell_the_step_and_the_finish(capsys: pytest.CaptureFixture[str]) -> None:
    spent: dict[str, float] = {}
    progress = Progress(STEPS, spent, [])
    with progress.running(STEPS[0]):
        time.sleep(0.2)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("[1/3] encode (about 6 min left, until ") and second == "[1/3] encode: 0 s"
    assert 0.1 < spent["encode"] < 5


def test_the_share_of_samples_counts_their_pixels(tmp_path: Path) -> None:
    """An image of phase 2 has four times the pixels of one of phase 1; each phase draws 126."""
    demo = Demo(tmp_path / "demo", 100)
    share = demo.steps[-1].done
    assert share is not None and share() == 0
    for phase, count, expected in (("phase1", 63, 0.1), ("phase1", 126, 0.2), ("phase2", 63, 0.6), ("phase2", 126, 1)):
        for number in range(count):
            picture = demo.folder / phase / "evaluations/step-1-auto/g3/pictures" / str(number // 63) / f"{number}.png"
            picture.parent.mkdir(parents=True, exist_ok=True)
            picture.touch()
        assert share() == pytest.approx(expected)


def test_a_failed_step_shows_its_error_and_is_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo = Demo(tmp_path / "demo", 100)
    demo.steps = (
        Step("fine", "fine", 1, "data", lambda: None),
        Step("bad", "bad", 1, "data", lambda: demo.call("json.tool", "--compact", str(tmp_path / "nothing"))),
    )
    with pytest.raises(
        SystemExit, match=r"nothing(.|\n)*error: `python -m json.tool --compact \S+ …` failed with exit"
    ):
        demo.run()
    again = Demo(tmp_path / "demo", 100)
    assert again.finished == ["fine"] and again.seconds.keys() == {"fine", "bad"}
    with pytest.raises(SystemExit, match="other settings"):
        Demo(tmp_path / "demo", 100, seed=1)


def test_images_are_stored_in_the_order_of_their_rows_so_that_a_demo_can_be_repeated(
    tmp_path: Path, in_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(demo: Demo, module: str, *words: str, **variables: str) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        {"precompute.download": download}[module](list(words))

    monkeypatch.setattr(Demo, "call", call)
    monkeypatch.setattr(urllib.request, "_opener", None)  # the download replaces it
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # a closed port
    demo = Demo(tmp_path / "demo", 40)
    demo.draw()
    demo.download()
    with tarfile.open(tmp_path / "demo" / "tars" / "00000.tar") as tar:
        names = tar.getnames()
    assert len(names) > 80 and names == sorted(names)
