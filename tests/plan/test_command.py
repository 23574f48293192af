"""`python -m plan`: its options, its files, its exit codes."""

import json
import re
from pathlib import Path

import pytest

from plan import report as report_module
from plan.__main__ import run
from plan.arithmetic.work import Work
from plan.text import render
from shards.base.errors import exit_code_of
from tests.plan.conftest import MakeReport


@pytest.fixture(autouse=True)
def _counted(monkeypatch: pytest.MonkeyPatch, sd2: Work) -> None:
    monkeypatch.setattr(report_module, "cached_work", lambda networks, buckets: sd2)


@pytest.mark.parametrize(
    ("arguments", "count"), [(["--gpus", "64", "--text.storage", "float8"], 2), (["--gpus", "--text.trim", "true"], 0)]
)
def test_the_requested_gpus_are_pointed_out(
    capsys: pytest.CaptureFixture[str], arguments: list[str], count: int
) -> None:
    run(arguments)
    assert capsys.readouterr().out.split("Latents")[0].count("> 64 ") == count


def test_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(["--out", str(tmp_path)])
    assert (tmp_path / "plan.txt").read_text() in capsys.readouterr().out
    written = json.loads((tmp_path / "plan.json").read_text())["plans"][0]
    assert [row["gpus"] for row in written["rows"]] == [8, 16, 32, 64, 128, 256, 512, 1024]
    assert {"field", "value", "unit", "source", "assumed"} == set(written["facts"][0])
    assert written["rows"][0]["phases"][0]["step"].keys() == {"compute", "traffic", "exposed", "data"}
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    run(["--text.storage", "float16", "--compare", "configs/plan.yaml", "configs/plan/h200.yaml"])
    shown = capsys.readouterr().out.split("Side by side")[1]
    storage = next(line.split() for line in shown.splitlines() if "text.storage" in line)
    assert storage == ["text.storage", "float16", "float8", "float8"]
    latents = next(line.split()[2:] for line in shown.splitlines() if "latents TB" in line)
    assert latents == ["188.3*", "102.6*", "102.6*"]
    # the H200's rates were measured on one GPU, and its price is assumed
    (row,) = (line.split() for line in shown.splitlines() if line.startswith("   8"))
    days, hours, costs = row[1:4], row[4:7], row[7:10]
    assert [days[2][0], hours[2][0], costs[2][-1]] == ["~", "~", "*"]
    assert all(cell[-1] == "*" for cells in (days, hours, costs) for cell in cells[:2])
    run(["--compare", "configs/plan.yaml"])
    assert "nothing" in capsys.readouterr().out.split("Side by side")[1]


def test_wrong_requests_exit_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(lambda: run(["--gpus", "many"])) == 2
    assert exit_code_of(lambda: run(["--gpu.knd", "H200"])) == 2
    assert "unknown option --gpu.knd (did you mean `gpu.kind`?)" in capsys.readouterr().err


@pytest.mark.parametrize("gpu", ["H100", "[H100]", "{kind: [H100]}"])
def test_a_gpu_section_of_the_wrong_type_exits_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], gpu: str
) -> None:
    (tmp_path / "plan.yaml").write_text(f"gpu: {gpu}\n")
    assert exit_code_of(lambda: run(["--config", str(tmp_path / "plan.yaml")])) == 2
    assert "`gpu" in capsys.readouterr().err


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw an empty file, because rendering takes most of the command's time."""
    monkeypatch.setattr("plan.figure.draw", lambda reports: b"")


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("folder", ["file", "file/plan"])
def test_a_folder_that_cannot_be_created_exits_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], folder: str
) -> None:
    (tmp_path / "file").write_text("")
    assert exit_code_of(lambda: run(["--out", str(tmp_path / folder)])) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "plan.txt cannot be written (" in " ".join(printed.err.split())


@pytest.mark.usefixtures("undrawn")
def test_plan_files_with_free_gpus(tmp_path: Path) -> None:
    run(["--gpu.price_per_hour", "0", "--out", str(tmp_path)])
    written = json.loads((tmp_path / "plan.json").read_text())["plans"][0]
    assert [bucket["pays_from"] for bucket in written["buckets"]] == [None, None]
    assert written["plan"]["gpu"]["price_per_hour"] == 0


def test_the_documentation_shows_what_the_command_prints(report: MakeReport) -> None:
    assert render(report("--gpus", "64")).strip() == Path("docs/evidence/plan-sd2.txt").read_text().strip()


def test_what_128_gpus_cost_on_the_page_is_what_its_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path("docs/how-to/cluster.md").read_text()
    text = " ".join(page.split())
    assert "`make plan GPUS=128`" in text
    run(["--gpus", "128"])
    (row,) = re.findall(r"^> +128 .*\d$", capsys.readouterr().out.split("Reading")[0], re.MULTILINE)
    *_, uninterrupted, days, failing = row.split()
    stated = re.findall(r"GPUs of both stages cost (\S+)\. The plan expects (\S+) and (\S+) days with", text)
    assert stated == [(uninterrupted, failing, f"{float(days):.1f}")]
    table = [line.split("|")[-2].strip() for line in page.splitlines() if re.match(r"\| [689] \|", line)]
    costs = [int(cost.removeprefix("$").replace(",", "")) for cost in table]
    # stage 1 and the phases are rounded apart
    assert len(costs) == 3 and abs(sum(costs) - int(uninterrupted[1:].replace(",", ""))) <= 2
