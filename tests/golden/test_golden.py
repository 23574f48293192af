"""Refactors change no numbers: curves, a resumed checkpoint and roots equal those computed by commit 8cb740e."""

import json
import shutil
from pathlib import Path

import pytest

from shards.__main__ import run as shards
from tests.golden.make import CASES, CHECKPOINT_STEP, HERE, RESUMED, curve_of, machine, train_case

GOLDEN = json.loads((HERE / "curves.json").read_text())
ROUNDING = 1e-5
"""Relative difference allowed for a different processor or torch version."""


def check_curve(name: str, found: dict[str, list[str]], expected: dict[str, list[str]]) -> None:
    """Compare bit for bit on the kind of machine that recorded this case, and up to rounding on all others."""
    if machine() == GOLDEN["recorded_elsewhere"].get(name, GOLDEN["machine"]):
        assert found == expected
    for key, values in expected.items():
        assert [float.fromhex(value) for value in found[key]] == pytest.approx(
            [float.fromhex(value) for value in values], rel=ROUNDING
        )


@pytest.mark.parametrize("name", CASES)
def test_curve(name: str, tmp_path: Path) -> None:
    check_curve(name, curve_of(train_case(name, tmp_path)), GOLDEN["curves"][name])


def test_the_checkpoint_resumes(tmp_path: Path) -> None:
    checkpoint = tmp_path / RESUMED / "checkpoints" / f"step-{CHECKPOINT_STEP:08d}"
    shutil.copytree(HERE / "checkpoint", checkpoint)
    resumed = curve_of(train_case(RESUMED, tmp_path))
    expected = {key: values[CHECKPOINT_STEP:] for key, values in GOLDEN["curves"][RESUMED].items()}
    check_curve(RESUMED, resumed, expected)


@pytest.mark.parametrize("root", sorted(path.name for path in (HERE / "roots").iterdir()))
def test_root_is_sound(root: str, capsys: pytest.CaptureFixture[str]) -> None:
    shards(["verify", str(HERE / "roots" / root)])
    assert "is intact" in capsys.readouterr().out
