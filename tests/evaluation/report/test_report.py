"""The report: its content, accessibility, and which metrics it compares."""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from evaluation.__main__ import run as command
from evaluation.report.charts import MARKERS, Series, line_chart
from evaluation.report.pictures import first_pictures, side_by_side, spread
from evaluation.report.runs import binned, read_runs, short_names, step_offsets
from shards.base.durable import sealed_json
from shards.base.errors import RequestError, exit_code_of
from shards.open import open_store
from tests.evaluation.report.pages import add_evaluation, make_run, report


def test_a_page_of_two_phases(tmp_path: Path) -> None:
    first = make_run(tmp_path / "a" / "phase1")
    second = make_run(tmp_path / "a" / "phase2", steps=20, init_from=str(first))
    for step in (10, 20, 40):
        add_evaluation(first, step, "id1", 5 - step / 10)
    add_evaluation(second, 20, "id2", 3)
    page = report(first, second, "--output", tmp_path / "out" / "page.html", "--price_per_hour", 2)
    source = page.source

    assert "The curve of a run that was initialised from another run starts where that run ended: phase2." in source
    assert all(f"<figcaption>kid, g8-s1-own, id {number}</figcaption>" in source for number in ("id1", "id2"))
    # 40 steps of 8 images at 20 images/s take 16 s, or 32 s of two processes
    assert '<th scope="row">phase1</th><td>320</td><td>2</td><td>0.004444</td><td>0.008889</td><td>$0.02</td>' in source
    assert "The root cannot be read from here" in source and "absent/root" in source
    assert "a &lt;b&gt;shape&lt;/b&gt; &amp; 0" in source and "<b>" not in source
    strip = [image for image in page.all("img") if "step 10" in (image["alt"] or "")]
    assert len(strip) == 3 and strip[0]["alt"] == "step 10: a <b>shape</b> & 0"
    assert "phase1, step 40: a" in source and "Runs side by side" in source


def test_a_page_of_a_real_run_accounts_for_its_data(trained: Path, tmp_path: Path) -> None:
    source = report(trained, "--output", tmp_path / "page.html").source
    assert "The root cannot be read" not in source and "run reads 64x64" in source
    for row in (("in the tars", 46), ("encoded", 30), ("rejected", 16), ("tars", 2)):
        assert '<th scope="row">{}</th><td>{}</td>'.format(*row) in source, row
    assert "Rejected samples" in source and '<th scope="row">not_an_image</th><td>2</td>' in source
    assert '<th scope="row">64x64</th><td>30</td>' in source and '<th scope="row">128x128</th><td>20</td>' in source
    assert len(read_runs([str(trained)])[0].curve("loss")) == 6


def test_the_page_is_self_contained_and_accessible(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    add_evaluation(run, 10, "id1", 5)
    page = report(run, "--output", tmp_path / "page.html")
    places = [a.get("src") or a.get("href") for tag in ("img", "a", "script", "link", "iframe") for a in page.all(tag)]
    assert all(place and place.startswith(("#", "data:image/png")) for place in places)
    assert "url(" not in page.source and "@import" not in page.source
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    targets = [place[1:] for place in places if place and place.startswith("#")]
    targets += " ".join(a["aria-labelledby"] or "" for _, a in page.tags if "aria-labelledby" in a).split()
    assert set(targets) <= set(ids) and targets[0] == "main"
    assert page.all("html") == [{"lang": "en"}] and len(page.all("main")) == len(page.all("h1")) == 1
    assert all(image["alt"] for image in page.all("img"))
    assert all(svg["role"] == "img" and svg["aria-labelledby"] for svg in page.all("svg"))
    assert len(page.all("svg")) == len(page.all("details")) == len(page.all("title")) - 1
    frames = [a for a in page.all("div") if a.get("class") == "frame"]
    assert frames and all(a["tabindex"] == "0" and a["aria-label"] for a in frames)
    assert len(page.all("caption")) == len(page.all("table"))
    assert all(a["scope"] in ("row", "col") for a in page.all("th"))
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h\d", tag)]
    assert all(after - before <= 1 for before, after in pairwise(levels))
    assert "prefers-color-scheme" in page.source and ":focus-visible" in page.source


def test_lines_are_distinguishable_without_colour() -> None:
    lines = [Series(f"run {i}", [(0, i), (1, i + 1)], style=i) for i in range(len(MARKERS))]
    svg = line_chart("t", "x", "y", lines)
    dashes = re.findall(r'stroke-dasharray="([^"]*)"', svg)
    assert len(set(dashes)) == len(lines) and all(marker in svg for marker in MARKERS)
    places = [float(y) for y in re.findall(r'<text x="433\.0" y="([\d.]+)"', svg)]
    assert len(places) == len(lines) and min(abs(a - b) for a in places for b in places if a != b) >= 19


@pytest.mark.parametrize("count", [2, 8, 13, 30])
def test_many_lines_stay_inside_the_chart_and_distinguishable(count: int) -> None:
    """All lines end in the same place at the bottom."""
    svg = line_chart("t", "x", "y", [Series(f"r{i}", [(0, 1), (1, 0)], style=i) for i in range(count)])
    places = sorted(float(y) - 4 for y in re.findall(r'<text x="433\.0" y="([\d.]+)"', svg))
    assert len(places) == count and places[0] > 0 and places[-1] <= 320 - 48
    assert len({round(place, 1) for place in places}) == count
    looks = re.findall(r'<g class="(s\d)"><g transform[^>]*>(<[^>]*>)', svg)
    assert len(set(looks)) == count


def test_charts_show_their_values() -> None:
    """Check the path and the error bars, and charts with one point, equal values and a log scale."""
    svg = line_chart("t", "x", "y", [Series("a", [(0, 0), (10, 10), (5, 5)], [(-10, 5), (0, 20), (0, 6)])])
    (path,) = re.findall(r'<path d="M([\d. L]+)" stroke', svg)
    (x0, y0), (x1, y1), (x2, y2) = ([float(v) for v in place.split()] for place in path.split("L"))
    assert x0 < x2 < x1 and y0 > y2 > y1
    assert x2 - x0 == pytest.approx(x1 - x2, abs=0.2) and y0 - y2 == pytest.approx(y2 - y1, abs=0.2)
    (low, high), *_ = re.findall(r'<path d="M[\d.]+ ([\d.]+)V([\d.]+)M', svg)
    assert float(low) - y0 == pytest.approx(y0 - y1, abs=0.2) and y0 - float(high) == pytest.approx(y0 - y2, abs=0.2)
    assert svg.count("h8") == 6
    almost = [(1, 0.1), (2, 0.1 + 1e-17), (3, 0.10000000000000002)]  # such as the means of equal values
    for points in ([(5, 5)], [(1, 2), (2, 2)], [(1, 0.001), (2, 1000)], almost):
        assert "nan" not in line_chart("t", "x", "y", [Series("a", points)], log=True).lower()


def test_runs_without_evaluations_or_a_log_and_folders_that_are_not_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = make_run(tmp_path / "bare")
    (bare / "metrics.jsonl").unlink()
    page = report(bare, "--output", tmp_path / "page.html")
    assert "Nothing has been logged yet" in page.source and "No metrics yet" in page.source

    def said(*words: Any) -> str:
        assert exit_code_of(lambda: command([str(word) for word in words])) == 2
        return capsys.readouterr().err.replace("\n", " ")

    assert "is not a training run: it has no config.yaml" in said("report", tmp_path)
    (tmp_path / "config.yaml").write_text("model: sd2")
    assert "is not a training run's config: it has no max_steps, global_batch_size, data" in said("report", tmp_path)
    assert "Name the runs before all options" in said("report")
    assert "The same run is listed more than once" in said("report", bare, bare)
    assert f"{tmp_path} cannot be written" in said("report", bare, "--output", tmp_path)
    other = make_run(tmp_path / "other")
    assert "bare and other have no metric in common: bare and other have none" in said("compare", bare, other)


def test_metrics_with_different_ids_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    for step in (10, 20):
        add_evaluation(first, step, "id1", step)
    add_evaluation(second, 10, "id2", 7)
    assert exit_code_of(lambda: command(["compare", str(first), str(second)])) == 2
    refused = capsys.readouterr().err.replace("\n", " ")
    assert "kid id1 (" in refused and "kid id2 (" in refused
    assert "are different metrics: they differ in the extractor" in refused
    add_evaluation(second, 20, "id1", 4)
    assert exit_code_of(lambda: command(["compare", str(first), str(second)])) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("kid id1 (lower is better)") and "20.0000" in shown[1] and "4.0000" in shown[2]


def test_values_that_round_to_zero_have_no_sign(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [make_run(tmp_path / name) for name in "ab"]
    for run in runs:
        add_evaluation(run, 10, "id1", -1e-9)
    command(["compare", *map(str, runs)])
    assert [line.split()[3] for line in capsys.readouterr().out.splitlines()[1:]] == ["0.0000", "0.0000"]


def test_other_weights_of_a_run_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    for run, weights, value in ((first, "auto", 1), (first, "raw", 9), (second, "auto", 2), (second, "raw", 8)):
        add_evaluation(run, 10, "id1", value, weights)
    command(["compare", str(first), str(second)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("step")[0].split() for line in lines] == [
        *(["kid", "id1", "(lower", "is", "better),", "N", "3"], ["a"], ["b"]),
        *(["kid", "id1", "(lower", "is", "better),", "raw", "weights,", "N", "3"], ["a"], ["b"]),
    ]
    assert [float(line.split()[3]) for line in lines if "step" in line] == [1, 2, 9, 8]


def test_a_run_that_diverged_has_no_recent_loss(tmp_path: Path) -> None:
    """The loss has not been finite in the last ten lines, so the summary shows no mean of earlier ones."""
    run = make_run(tmp_path / "run", steps=150)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    shown = []
    for first in (10, 5):  # number of the first line without a finite loss
        rows = [line | ({"loss": None} if number >= first else {}) for number, line in enumerate(lines)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        source = report(run, "--output", tmp_path / "page.html").source
        shown.append(re.findall('<th scope="row">run</th><td>150</td><td>100</td><td>(.*?)</td>', source))
    assert shown == [[f"{sum(1 / step for step in range(60, 101, 10)) / 5:.4g}"], ["–"]]


def test_hours_count_the_processes_of_each_line(tmp_path: Path) -> None:
    """10 of 40 steps run on two processes, the others on one, at the same speed of the run."""
    run = make_run(tmp_path / "run")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    rest = [line.replace('"images_per_second_per_gpu": 10.0', '"images_per_second_per_gpu": 20.0') for line in lines]
    (run / "metrics.jsonl").write_text("\n".join([lines[0], *rest[1:]]) + "\n")
    (found,) = read_runs([str(run)])
    assert found.seconds == pytest.approx(16) and found.num_processes == 1
    assert found.gpu_hours * 3600 == pytest.approx(4 * 2 + 12)


def test_first_pictures_of_a_sample_set(tmp_path: Path) -> None:
    """Small images are exact, and images of a missing part are skipped."""
    run = make_run(tmp_path / "run")
    add_evaluation(run, 10, "id", 1)
    place = run / "evaluations" / "step-00000010-auto" / "g8-s1-own"
    shown = first_pictures(place, 9, side=64)
    assert {prompt.id: picture.getpixel((0, 0)) for prompt, picture in shown.items()} == {
        f"p{i}": (10, 40 * i, 7) for i in range(3)
    }
    (small,) = first_pictures(place, 1, side=16).values()
    assert small.size == (16, 8)
    strip = side_by_side({f"step {i}": picture for i, picture in enumerate(shown.values())})
    assert strip.size == (3 * 68 - 4, 52) and strip.getpixel((68, 40)) == (10, 40, 7)
    (place / "receipts" / "pictures" / "00000.json").unlink()
    assert [prompt.id for prompt in first_pictures(place, 9, side=64)] == ["p2"]


def test_short_names_step_offsets_bins_and_spreads(tmp_path: Path) -> None:
    assert short_names(["runs/a", "runs/b/"]) == ["a", "b"] and short_names(["s3://k/phase1"]) == ["phase1"]
    assert short_names(["x/run", "y/run"]) == ["x/run", "y/run"]
    a = make_run(tmp_path / "a")
    b = make_run(tmp_path / "b", steps=20, init_from=str(a))
    c = make_run(tmp_path / "c", init_from=str(b))
    assert step_offsets(read_runs([str(c), str(a), str(b)])) == {"c": 60, "a": 0, "b": 40}
    assert binned([(i, 2.0 * i) for i in range(7)], 3) == [(1, 2), (4, 8), (6, 12)]
    assert spread(list(range(10)), 3) == [0, 4, 9] and spread([1, 2], 3) == [1, 2]


def test_runs_are_recognised_however_their_location_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "a")
    b = make_run(tmp_path / "b", steps=20, init_from="a")
    c = make_run(tmp_path / "c", init_from=b.as_uri())
    (tmp_path / "link").symlink_to("a")
    assert step_offsets(read_runs([str(c), "b", str(tmp_path / "link")])) == {"c": 60, "b": 40, "link": 0}
    for same in (str(tmp_path / "a"), (tmp_path / "a").as_uri(), "b/../a", "link"):
        with pytest.raises(RequestError, match=f"listed more than once: a, {re.escape(same)}"):
            read_runs(["a", same])


def test_evaluations_are_part_of_the_cost(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")  # 40 steps of 8 images at 20 images/s take 32 s of two processes
    for number, seconds in enumerate((3600.0, 1800.0)):
        store = open_store(run / "evaluations" / f"step-{number + 1:08d}-auto" / "g8-s1-own")
        for folder in ("pictures", "features/abc"):
            store.create(f"receipts/{folder}/00000.json", sealed_json({"seconds": seconds}))
    page = report(run, "--output", tmp_path / "page.html", "--price_per_hour", "2").source
    assert "run, evaluations (2)" in page and "$6.00" in page and "$6.02" in page
