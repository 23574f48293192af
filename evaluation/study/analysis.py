"""Count votes by the protocol's rules: which model is preferred, by how much, and with what uncertainty."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import median
from typing import Any

import numpy as np

from evaluation.metrics.intervals import COVERAGE
from evaluation.study.protocol import Protocol, Study
from evaluation.study.schedule import Showing, make_schedule
from evaluation.study.statistics.preference import preference
from evaluation.study.statistics.strengths import strengths
from evaluation.study.votes import Vote
from shards.base.errors import RequestError

SCORES = {"first": 1.0, "tie": 0.5, "second": 0.0}
"""Answer → score of the image shown first."""
ESTIMAND = "the share of votes from raters like these on prompts like these, a tie counting as half a vote"


@dataclass(frozen=True)
class Answer:
    """A vote together with its trial."""

    vote: Vote
    showing: Showing
    score: float
    """1 if the vote is for the item's first image, 0 if it is for the second, 0.5 if it is a tie, regardless of the
    sides on which the images were shown."""


def analyse(study: Study, votes: Sequence[Vote], partial: bool = False) -> dict[str, Any]:
    """Compute the content of results.json from a study's votes.

    Raises:
        RequestError: there are no votes to count, or planned votes are missing and `partial` is false.
    """
    protocol = study.protocol
    schedule = make_schedule(study)
    answers = []
    for vote in votes:
        showing, score = schedule[vote.rater][vote.showing - 1], SCORES[vote.answer]
        answers.append(Answer(vote, showing, 1 - score if showing.swapped else score))
    planned = sum(map(len, schedule)) * len(protocol.config.questions)
    if len(answers) < planned and not partial:
        raise RequestError(
            f"{study.folder} has {len(answers)} of {planned} planned answers. A study that is stopped as soon as its "
            f"result looks good tends to find differences that do not exist. Wait for the missing answers; `python -m "
            f"evaluation.study status` shows each rater's progress. Alternatively, set --partial true to get a result "
            f"that is marked as partial."
        )
    raters = [_report_rater(number, schedule[number], answers, protocol) for number in range(protocol.config.raters)]
    excluded = {rater["number"] - 1 for rater in raters if rater["excluded"]}
    counted = [a for a in answers if a.showing.kind == "first" and a.vote.rater not in excluded]
    if not counted:
        remedy = (
            "Run the analysis again once more raters have voted."
            if len(answers) < planned
            else "No more votes will come, so prepare a new study, with other raters."
        )
        raise RequestError(
            f"{study.folder} has no votes to count (answers: {len(answers)}, raters excluded by the protocol's rule: "
            f"{len(excluded)}). {remedy}"
        )
    return {
        "name": protocol.config.name,
        "protocol_sha256": protocol.sha256,
        "questions": protocol.config.questions,
        "models": [{"letter": at, **model} for at, model in zip(protocol.letters, protocol.models, strict=True)],
        "answers": len(answers),
        "planned": planned,
        "partial": len(answers) < planned,
        "margin": protocol.config.margin,
        "coverage": COVERAGE,
        "estimand": ESTIMAND,
        "exclude_below": protocol.config.gold.exclude_below,
        "preferences": list(_preferences(counted, protocol, lambda answer: None)),
        "by_category": list(_preferences(counted, protocol, lambda answer: answer.showing.item.category or "none"))
        if any(item.category for item in protocol.items)
        else [],
        "strengths": list(_strengths(counted, protocol)) if len(protocol.models) > 2 else [],
        "raters": raters,
    }


def _report_rater(rater: int, showings: list[Showing], answers: Sequence[Answer], protocol: Protocol) -> dict[str, Any]:
    """Describe a rater's progress and consistency, and decide whether the protocol's rule excludes the rater."""
    own = [answer for answer in answers if answer.vote.rater == rater]
    golds = [
        answer.score == 1
        for answer in own
        if answer.showing.kind == "gold" and answer.showing.item.question in (None, answer.vote.question)
    ]
    first = {(a.showing.item.id, a.vote.question): a.score for a in own if a.showing.kind == "first"}
    repeats = [a.score == first[a.showing.item.id, a.vote.question] for a in own if a.showing.kind == "repeat"]
    seconds = {answer.vote.showing: answer.vote.seconds for answer in own}
    threshold = protocol.config.gold.exclude_below
    return {
        "number": rater + 1,
        "done": len(seconds),
        "showings": len(showings),
        "gold_right": sum(golds),
        "gold_answers": len(golds),
        "repeats_same": sum(repeats),
        "repeats_answers": len(repeats),
        "ties": sum(answer.score == 0.5 for answer in own),
        "answers": len(own),
        "median_seconds": median(seconds.values()) if seconds else None,
        "excluded": bool(golds) and threshold is not None and sum(golds) / len(golds) < threshold,
    }


def _preferences(
    counted: Sequence[Answer], protocol: Protocol, group: Callable[[Answer], str | None]
) -> list[dict[str, Any]]:
    """Compute one row per question, pair of models and group of items."""
    groups: dict[tuple[str, tuple[int, int], str | None], list[Answer]] = {}
    for answer in counted:
        assert answer.showing.item.models is not None
        groups.setdefault((answer.vote.question, answer.showing.item.models, group(answer)), []).append(answer)
    order = list(protocol.config.questions)
    keys = sorted(groups, key=lambda key: (order.index(key[0]), key[1], key[2] or ""))
    return [_preference(groups[key], key, protocol) for key in keys]


def _preference(
    answers: Sequence[Answer], key: tuple[str, tuple[int, int], str | None], protocol: Protocol
) -> dict[str, Any]:
    question, (first, second), category = key
    scores, prompts, raters = _columns(answers)
    found = preference(scores, prompts, raters)
    low, high = found.interval()
    equivalent = found.is_within(protocol.config.margin)
    a, b = protocol.letters[first], protocol.letters[second]
    verdict = f"{a} is preferred" if low > 0.5 else f"{b} is preferred" if high < 0.5 else "no difference shown"
    return {
        "question": question,
        "models": [a, b],
        "category": category,
        "preference": found.value,
        "low": low,
        "high": high,
        "degrees_of_freedom": found.degrees,
        "votes": len(scores),
        "prompts": len(np.unique(prompts)),
        "raters": len(np.unique(raters)),
        "won": int((scores == 1).sum()),
        "tied": int((scores == 0.5).sum()),
        "lost": int((scores == 0).sum()),
        "equivalent": equivalent,
        "verdict": verdict + (f"; equivalent within ±{protocol.config.margin:g}" if equivalent else ""),
    }


def _strengths(counted: Sequence[Answer], protocol: Protocol) -> list[dict[str, Any]]:
    """Compute one row per model for each question that has votes. Infinite bounds of a strength become None."""
    rows = []
    for question in protocol.config.questions:
        own = [answer for answer in counted if answer.vote.question == question]
        if not own:
            continue
        pairs = np.array([answer.showing.item.models for answer in own])
        scores, prompts, raters = _columns(own)
        found = strengths(scores, pairs, prompts, raters, len(protocol.models), protocol.config.seed)
        for number, letter in enumerate(protocol.letters):
            columns = {name: float(values[number]) for name, values in vars(found).items()}
            finite = {name: value if isfinite(value) else None for name, value in columns.items()}  # JSON has no ∞
            rows.append({"question": question, "model": letter, **finite})
    return rows


def _columns(answers: Sequence[Answer]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the scores, prompt ids and raters of N answers, each as an array of shape (N,)."""
    return (
        np.array([answer.score for answer in answers]),
        np.array([answer.showing.item.prompt_id for answer in answers]),
        np.array([answer.vote.rater for answer in answers]),
    )
