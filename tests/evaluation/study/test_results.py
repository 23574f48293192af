"""The files with a study's results, which refer to no other files."""

import json
import re
from pathlib import Path

import pytest

from evaluation.study.analysis import analyse
from evaluation.study.figure import draw
from evaluation.study.results import write_results
from shards.base.durable import read_sealed_json
from tests.evaluation.study.studies import make_study, random_score, votes_of


@pytest.mark.parametrize("num_models", [2, 3])
def test_files(num_models: int, tmp_path: Path) -> None:
    its = make_study(tmp_path / "study", num_models=num_models)
    results = analyse(its, votes_of(its, random_score(4)))
    write_results(results, tmp_path)
    assert read_sealed_json(tmp_path / "results.json") == json.loads(json.dumps(results))
    picture = (tmp_path / "results.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and b"Software" not in picture[:200]
    page = (tmp_path / "results.html").read_text()
    assert not re.search(r"(?:src|href)=\"(?!data:)|<script|\$\w", page)  # no external resources, no unfilled fields
    assert its.protocol.sha256 in page and 'alt="Share of votes for each model.' in page
    assert page.count("<table>") == num_models + 1
    write_results(results | {"name": "<b>&"}, tmp_path)
    assert "<h1>&lt;b&gt;&amp;</h1>" in (tmp_path / "results.html").read_text()


def test_dollar_signs_are_not_parsed_as_mathematics(tmp_path: Path) -> None:
    """matplotlib would fail to parse the text between two of them."""
    its = make_study(tmp_path / "study")
    results = analyse(its, votes_of(its, random_score(4)))
    asked = {name: r"Which is worth $\frac$ more?" for name in results["questions"]}
    by_category = [row | {"category": "$_$"} for row in results["by_category"]]
    changed = {"name": "Worth $^$", "questions": asked, "by_category": by_category}
    assert draw(results | changed).startswith(b"\x89PNG")
