"""Analysis of votes (sides, gold items, repeats, exclusion), and the study's commands."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
from PIL import Image

from evaluation.study.__main__ import run
from evaluation.study.analysis import analyse
from evaluation.study.figure import draw
from evaluation.study.protocol import Study, read_study
from evaluation.study.results import format_results, write_results
from evaluation.study.results import page as render
from evaluation.study.schedule import Showing, make_schedule
from evaluation.study.statistics.preference import preference
from evaluation.study.votes import Vote, Votes, open_votes
from shards.base.durable import read_sealed_json
from shards.base.errors import RequestError, exit_code_of
from tests.evaluation.study.studies import make_set, make_study, random_score, votes_of


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return make_study(tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return make_study(tmp_path_factory.mktemp("three"), num_models=3)


def test_swapped_sides_are_undone(study: Study) -> None:
    """Always preferring A's image, on either side, means preferring A."""
    results = analyse(study, votes_of(study, lambda rater, showing, question: 1.0))
    for row in results["preferences"]:
        assert row["preference"] == 1 and row["models"] == ["A", "B"] and row["votes"] == 24
        assert (row["won"], row["tied"], row["lost"], row["raters"], row["prompts"]) == (24, 0, 0, 3, 8)
        assert row["verdict"] == "no difference shown" and row["high"] == pytest.approx(1)  # with three raters
    sided = [Vote(v.rater, v.showing, v.question, "first", 1.0) for v in votes_of(study, lambda r, s, q: 1.0)]
    about = analyse(study, sided)
    left = [own for own, rater in zip(make_schedule(study), about["raters"], strict=True) if not rater["excluded"]]
    swapped = np.mean([showing.swapped for own in left for showing in own if showing.kind == "first"])
    assert about["preferences"][0]["preference"] == pytest.approx(1 - swapped)
    # reveals raters who always click on the same side
    assert all(rater["repeats_same"] == 0 for rater in about["raters"])


def test_repeats_and_gold_items_do_not_count(study: Study) -> None:
    """Contradictory repeats change the rater's report, but not the preferences."""
    honest = random_score(0)
    plain = analyse(study, votes_of(study, honest))

    def inconsistent(rater: int, showing: Showing, question: str) -> float:
        score = honest(rater, showing, question)
        return 1 - score if showing.kind == "repeat" and rater == 1 else score

    results = analyse(study, votes_of(study, inconsistent))
    assert results["preferences"] == plain["preferences"]
    raters = results["raters"]
    assert [rater["repeats_same"] == rater["repeats_answers"] for rater in raters] == [True, False, True]
    assert all(rater["repeats_answers"] == 4 and rater["gold_answers"] == 4 for rater in raters)
    assert all(rater["median_seconds"] == 2.5 and rater["done"] == rater["showings"] for rater in raters)


def test_intervals_use_the_counted_votes(study: Study) -> None:
    votes = votes_of(study, random_score(1))
    results = analyse(study, votes)
    for row in results["preferences"]:
        scores, prompts, raters = [], [], []
        for rater, showings in enumerate(make_schedule(study)):
            for showing in showings:
                if showing.kind == "first":
                    scores.append(random_score(1)(rater, showing, row["question"]))
                    prompts.append(showing.item.prompt_id)
                    raters.append(rater)
        found = preference(np.array(scores), np.array(prompts), np.array(raters))
        assert row["preference"] == pytest.approx(float(found.value))
        assert [row["low"], row["high"]] == pytest.approx([float(end) for end in found.interval()])
    categories = {(row["question"], row["category"]): row["votes"] for row in results["by_category"]}
    assert categories == {(q, c): 12 for q in ("quality", "alignment") for c in ("colours", "counting")}


@pytest.mark.parametrize(("exclude_below", "out"), [(0.75, [False, True, False]), (None, [False] * 3)])
def test_raters_who_fail_gold_items_are_excluded_if_the_protocol_says_so(
    tmp_path: Path, exclude_below: float | None, out: list[bool]
) -> None:
    study = make_study(tmp_path, gold={"share": 0.25, "exclude_below": exclude_below})

    def score(rater: int, showing: Showing, question: str) -> float:
        return 0.0 if rater == 1 else 1.0

    results = analyse(study, votes_of(study, score))
    assert [rater["excluded"] for rater in results["raters"]] == out
    assert [rater["gold_right"] for rater in results["raters"]] == [4, 0, 4]
    assert results["preferences"][0]["votes"] == (16 if out[1] else 24)
    assert ("(less than 75% of gold answers correct): rater 2." in format_results(results)) == out[1]
    if out[1]:
        counts = r"has no votes to count \(answers: 72, raters excluded by the protocol's rule: 3\)"
        message = rf"{counts}\. .* prepare a new study"
        with pytest.raises(RequestError, match=message):
            analyse(study, votes_of(study, lambda r, s, q: 0.0))


@pytest.mark.parametrize(("wrong", "out"), [(1, False), (2, True)])
def test_raters_exactly_at_the_threshold_are_not_excluded(study: Study, wrong: int, out: bool) -> None:
    """3 of 4 correct gold answers are exactly 75 %."""
    golds = [s.number for s in make_schedule(study)[1] if s.kind == "gold"]

    def score(rater: int, showing: Showing, question: str) -> float:
        is_wrong = rater == 1 and question == "quality" and showing.number in golds[:wrong]
        return 0.0 if is_wrong else 1.0

    results = analyse(study, votes_of(study, score))
    assert results["raters"][1]["gold_right"] == 4 - wrong
    assert [rater["excluded"] for rater in results["raters"]] == [False, out, False]


@pytest.mark.parametrize("question", ["", "quality"])
def test_a_gold_item_may_count_for_one_question_only(tmp_path: Path, question: str) -> None:
    """An image and its blurred copy fit the text equally well, so honest raters answer that with a tie."""
    for name, level in (("sharp", 200), ("blurred", 20)):
        Image.new("RGB", (64, 48), (level, 0, 0)).save(tmp_path / f"{name}.png")
    row = f"a picture,sharp.png,blurred.png,{question}\n"
    (tmp_path / "gold.csv").write_text(f"prompt,better,worse,question\n{row * 2}")
    study = make_study(tmp_path, gold={"file": tmp_path / "gold.csv"})

    def honest(rater: int, showing: Showing, asked: str) -> float:
        return 0.5 if showing.kind == "gold" and asked == "alignment" else 1.0

    votes = votes_of(study, honest)
    if question:
        raters = analyse(study, votes)["raters"]
        assert [(rater["gold_right"], rater["gold_answers"]) for rater in raters] == [(1, 1)] * 3
    else:  # half of the answers are wrong
        assert [item["question"] for item in study.protocol.as_json()["gold"]] == [None] * 2
        with pytest.raises(RequestError, match="excluded by the protocol's rule: 3"):
            analyse(study, votes)


def test_an_incomplete_study_is_analysed_only_on_request(study: Study) -> None:
    votes = votes_of(study, random_score(2))[:-3]
    with pytest.raises(RequestError, match=r"has 69 of 72 planned answers\. A study that is stopped as soon as"):
        analyse(study, votes)
    results = analyse(study, votes, partial=True)
    assert results["partial"] and "PARTIAL: the study has 69 of 72 planned answers" in format_results(results)
    with pytest.raises(RequestError, match=r"has no votes to count \(answers: 0,.* once more raters have voted"):
        analyse(study, [], partial=True)


def test_a_question_without_votes_has_no_result(three: Study, tmp_path: Path) -> None:
    """The first question of one item is answered, the second is not."""
    schedule = make_schedule(three)
    votes = votes_of(three, random_score(0))
    vote = next(vote for vote in votes if schedule[vote.rater][vote.showing - 1].kind == "first")
    results = analyse(three, [vote], partial=True)
    write_results(results, tmp_path)
    assert [row["question"] for row in results["preferences"]] == ["quality"]
    assert {row["question"] for row in results["strengths"]} <= {"quality"}
    page = (tmp_path / "results.html").read_text()
    assert "Which picture fits the text better? no votes counted" in page and "multiple comparisons" not in page
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")


def test_equivalence_is_shown_by_many_balanced_votes(tmp_path: Path) -> None:
    study = make_study(tmp_path, raters=30, votes_per_item=30, margin=0.2)
    results = analyse(study, votes_of(study, random_score(3, 0.4)))
    row = results["preferences"][0]
    assert 0.4 < row["low"] < 0.5 < row["high"] < 0.6
    assert row["equivalent"] and row["verdict"] == "no difference shown; equivalent within ±0.2"
    wide = analyse(study, votes_of(study, random_score(3, 0.75)))["preferences"][0]
    assert not wide["equivalent"] and wide["verdict"] == "A is preferred"
    other = analyse(study, votes_of(study, random_score(3, 0.05)))["preferences"][0]
    assert not other["equivalent"] and other["verdict"] == "B is preferred"


def test_three_models(three: Study) -> None:
    order = {0: 2, 1: 1, 2: 0}  # A is better than B, and B than C

    def score(rater: int, showing: Showing, question: str) -> float:
        if showing.item.models is None:
            return 1.0
        first, second = showing.item.models
        is_odd = (rater + int(showing.item.prompt_id[1:])) % 4 == 0
        return float((order[first] > order[second]) != is_odd)

    results = analyse(three, votes_of(three, score))
    assert [tuple(row["models"]) for row in results["preferences"]] == [("A", "B"), ("A", "C"), ("B", "C")] * 2
    for question in ("quality", "alignment"):
        rows = [row for row in results["strengths"] if row["question"] == question]
        assert [row["model"] for row in rows] == ["A", "B", "C"]
        assert rows[0]["value"] > rows[1]["value"] > rows[2]["value"]
        assert all(row["low"] - 1e-9 < row["value"] < row["high"] + 1e-9 for row in rows)  # B is always midway
    assert analyse(three, votes_of(three, score)) == results


# --- the files ---


def test_one_counted_rater_gives_unbounded_strengths(three: Study, tmp_path: Path) -> None:
    votes = [vote for vote in votes_of(three, random_score(5)) if vote.rater == 0]
    results = analyse(three, votes, partial=True)
    write_results(results, tmp_path)
    stored = read_sealed_json(tmp_path / "results.json")["strengths"]
    assert {(row["low"], row["high"], row["share_low"], row["share_high"]) for row in stored} == {(None, None, 0, 1)}
    page = (tmp_path / "results.html").read_text()
    assert page.count("<td>unbounded</td>") == len(stored) and "(0.0% to 100.0%)" in page
    assert "A over the others:" in format_results(results) and "[0.0%, 100.0%]" in format_results(results)


def test_files_refer_to_no_other_files(study: Study, tmp_path: Path) -> None:
    results = analyse(study, votes_of(study, random_score(4)))
    write_results(results, tmp_path)
    assert read_sealed_json(tmp_path / "results.json") == json.loads(json.dumps(results))
    picture = (tmp_path / "results.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and b"Software" not in picture[:200]
    page = (tmp_path / "results.html").read_text()
    count = len(results["preferences"])
    for text in (page, format_results(results)):
        assert f"The {count} intervals are not corrected for multiple comparisons" in text
    assert not re.search(r"(?:src|href)=\"(?!data:|#)|<script|\$\w", page)  # no external resources, no unfilled fields
    assert study.protocol.sha256 in page and 'alt="Share of votes for each model.' in page
    assert page.count("<table>") == len(study.protocol.models) + 2
    assert "<h1>&lt;b&gt;&amp;: results</h1>" in render(results | {"name": "<b>&"}, picture)


def test_dollar_signs_are_not_parsed_as_mathematics(study: Study) -> None:
    """matplotlib would fail to parse the text between two of them."""
    results = analyse(study, votes_of(study, random_score(4)))
    asked = {name: r"Which is worth $\frac$ more?" for name in results["questions"]}
    by_category = [row | {"category": "$_$"} for row in results["by_category"]]
    changed = {"name": "Worth $^$", "questions": asked, "by_category": by_category}
    assert draw(results | changed).startswith(b"\x89PNG")


# --- the commands ---


def test_from_sample_sets_to_a_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*words: str, code: int = 0) -> str:
        assert exit_code_of(lambda: run([*words, "--output", str(tmp_path / "study")])) == code
        out = capsys.readouterr()
        return " ".join((out.out + out.err).split()) if code else out.out

    assert "is not a study" in said("serve", code=2)
    sets = [str(make_set(tmp_path / name, number)) for number, name in enumerate("ab")]
    protocol = ["--protocol.raters", "3", "--protocol.votes_per_item", "2"]
    text = said("prepare", "--sets", ",".join(sets), *protocol)
    assert f"A: {sets[0]}" in text and "8 items, 3 raters; each rater sees 7 to 8 pairs" in text
    sha256 = re.search(r"Protocol (\w{64}): send this hash", text)
    links = said("invite", "2", "--serve.origin", "https://s.example").split()
    assert links[::2] == ["1", "2"]
    assert all(re.fullmatch(r"https://s\.example/#[\w-]{32}", link) for link in links[1::2])
    assert "The protocol has 3 raters, and the number invited so far is 2." in said("invite", "2", code=2)
    assert "Pass a number of raters, as in `python -m evaluation.study invite 1`" in said("invite", code=2)
    assert said("invite", "1").startswith("3\thttp://127.0.0.1:8770/#")
    assert said("invite", "--again", "2").startswith("2\t")
    assert "Rater 4 has not been invited yet" in said("invite", "--again", "4", code=2)
    assert "or --again to replace a link, but not both" in said("invite", "1", "--again", "2", code=2)
    wildcard = said("invite", "--again", "2", "--serve.host", "0.0.0.0", code=2)
    assert "Set --serve.origin, such as http://study.example:8770." in wildcard
    assert re.fullmatch(r"rater 1: 0 of \d\nrater 2: 0 of \d\nrater 3: 0 of \d\n", said("status"))
    assert "has 0 of" in said("analyse", code=2)

    study = read_study(tmp_path / "study")
    assert sha256 is not None and sha256[1] == study.protocol.sha256
    with open_votes(study) as votes:
        for vote in votes_of(study, lambda r, s, q: 1.0):
            votes.cast(vote.rater, vote.showing, {vote.question: vote.answer}, "x", 1.0)
    text = said("analyse")
    assert "quality      A over B: 100.0% [" in text and "No rater was excluded." in text
    assert {path.suffix for path in (tmp_path / "study").glob("results.*")} == {".html", ".json", ".png"}
    assert "contains a study with a different protocol" in said("prepare", "--sets", ",".join(sets), code=2)
    next((tmp_path / "study" / "pictures").iterdir()).unlink()
    assert "is missing. Restore it from a backup" in said("serve", code=1)


def test_power_does_not_need_a_study(capsys: pytest.CaptureFixture[str]) -> None:
    run(["power", "--protocol.margin", "0.1", "--power.raters", "10,30", "--power.prompts", "200"])
    out = capsys.readouterr().out
    assert len(re.findall(r"^ +(?:10|30) +200 ", out, re.MULTILINE)) == 2
    assert "Sufficient to detect a preference of 60% with probability 80%" in out


def test_an_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(lambda: run(["vote"])) == 2
    assert "has no command `vote`. Choose one of: power, prepare" in capsys.readouterr().err


def test_concurrent_invitations_go_to_different_raters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    study = make_study(tmp_path, raters=12)
    together = Barrier(4, timeout=60)

    @contextmanager
    def open_together(study: Study) -> Iterator[Votes]:
        with open_votes(study) as votes:
            together.wait()
            yield votes

    monkeypatch.setattr("evaluation.study.__main__.open_votes", open_together)

    def invite() -> None:
        run(["invite", "3", "--output", str(study.folder)])

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(invite) for _ in range(4)]:
            future.result()
    links = re.findall(r"(\d+)\thttp://[^#]+#([\w-]+)", capsys.readouterr().out)
    assert sorted(int(rater) for rater, _ in links) == list(range(1, 13))
    with open_votes(study) as votes:
        assert all(votes.rater_of(token) == int(rater) - 1 for rater, token in links)
