"""Write a study's results: results.json, results.html, results.png, and a summary for the terminal."""

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

from markupsafe import Markup

from evaluation.report.markup import macros, render_page, section
from evaluation.study.figure import draw, model_shares
from shards.base.durable import sealed_json, write_atomically

Columns = list[tuple[str, Callable[[dict[str, Any]], Any]]]
"""Columns of a table: each has a heading and a function that returns a row's cell."""
PREFERENCES: Columns = [
    ("question", lambda row: row["question"]),
    ("category", lambda row: row["category"] or "all"),
    ("models", lambda row: " over ".join(row["models"])),
    ("first preferred", lambda row: f"{row['preference']:.1%}"),
    ("95 % interval", lambda row: f"{row['low']:.1%} to {row['high']:.1%}"),
    ("won, tied, lost", lambda row: f"{row['won']}, {row['tied']}, {row['lost']}"),
    ("raters", lambda row: row["raters"]),
    ("prompts", lambda row: row["prompts"]),
    ("result", lambda row: row["verdict"]),
]
STRENGTHS: Columns = [
    ("question", lambda row: row["question"]),
    ("model", lambda row: row["model"]),
    ("preferred to each other model", lambda row: f"{row['share']:.1%}"),
    ("95 % interval", lambda row: f"{row['share_low']:.1%} to {row['share_high']:.1%}"),
    ("strength (log odds)", lambda row: f"{row['value']:+.3f}"),
    ("95 % interval", lambda row: "unbounded" if row["low"] is None else f"{row['low']:+.3f} to {row['high']:+.3f}"),
]
RATERS: Columns = [
    ("rater", lambda rater: rater["number"]),
    ("done", lambda rater: f"{rater['done']} of {rater['showings']}"),
    ("gold correct", lambda rater: f"{rater['gold_right']} of {rater['gold_answers']}"),
    ("repeats consistent", lambda rater: f"{rater['repeats_same']} of {rater['repeats_answers']}"),
    ("ties", lambda rater: f"{rater['ties']} of {rater['answers']}"),
    ("median seconds", lambda rater: "" if (s := rater["median_seconds"]) is None else f"{s:.1f}"),
    ("counted", lambda rater: "no" if rater["excluded"] else "yes"),
]


def write_results(results: dict[str, Any], folder: Path) -> None:
    """Write results.png, results.html and results.json, each atomically."""
    chart = draw(results)
    write_atomically(folder / "results.png", chart)
    write_atomically(folder / "results.html", page(results, chart).encode())
    write_atomically(folder / "results.json", sealed_json(results))


def format_results(results: dict[str, Any]) -> str:
    """Format the models, preferences, strengths and a summary of the raters for the terminal."""
    lines = [f"{model['letter']}: {model['place']}" for model in results["models"]]
    for row in results["preferences"]:
        lines.append(
            f"{row['question']:<12} {row['models'][0]} over {row['models'][1]}: {row['preference']:6.1%} "
            f"[{row['low']:.1%}, {row['high']:.1%}] (votes: {row['votes']}, raters: {row['raters']}, "
            f"prompts: {row['prompts']}): {row['verdict']}"
        )
    for row in results["strengths"]:
        lines.append(
            f"{row['question']:<12} {row['model']} over the others: {row['share']:6.1%} "
            f"[{row['share_low']:.1%}, {row['share_high']:.1%}]"
        )
    lines.append(f"Brackets show 95 % intervals of {results['estimand']}.")
    if caution := chance_warning(results):
        lines.append(caution)
    lines.append(summarise_raters(results))
    if results["partial"]:
        lines.append(partial_warning(results))
    return "\n".join(lines)


def chance_warning(results: dict[str, Any]) -> str:
    """Return a caution about multiple comparisons. It is empty if there is only one question and pair of models."""
    count = len(results["preferences"])
    return (
        f"One interval in twenty misses its true value by chance. The {count} intervals are not corrected for multiple "
        f"comparisons, so treat a single difference among many as a lead, not as a result."
        if count > 1
        else ""
    )


def summarise_raters(results: dict[str, Any]) -> str:
    """Summarise which raters were excluded, and how well all raters answered gold items and repeats."""
    raters = results["raters"]
    excluded = [f"rater {rater['number']}" for rater in raters if rater["excluded"]]
    consistent, repeats = (sum(rater[name] for rater in raters) for name in ("repeats_same", "repeats_answers"))
    correct, golds = (sum(rater[name] for rater in raters) for name in ("gold_right", "gold_answers"))
    if excluded:
        rule = f"less than {results['exclude_below']:.0%} of gold answers correct"
        exclusion = f"Excluded by the protocol's rule ({rule}): {', '.join(excluded)}."
    else:
        exclusion = "No rater was excluded."
    return (
        f"{exclusion} Gold answers correct: {correct} of {golds}. "
        f"Repeats answered consistently: {consistent} of {repeats}."
    )


def partial_warning(results: dict[str, Any]) -> str:
    """Return a warning that the results of an incomplete study cannot be relied on."""
    return (
        f"PARTIAL: the study has {results['answers']} of {results['planned']} planned answers. A study that is stopped "
        f"as soon as its result looks good tends to find differences that do not exist."
    )


def page(results: dict[str, Any], chart: bytes) -> str:
    """Render results.html with the chart, a PNG, embedded in it."""
    shares = []
    for question, text in results["questions"].items():
        ends = model_shares(results, question).items()
        by_model = [f"{letter} {value:.1%} ({low:.1%} to {high:.1%})" for letter, (value, low, high) in ends]
        shares.append(f"{text} {'; '.join(by_model) or 'no votes counted'}")
    url = "data:image/png;base64," + base64.b64encode(chart).decode()
    note = (
        f"The 95 % intervals cover {results['estimand']}. The grey band is the margin of equivalence, one half ± "
        f"{results['margin']:g}, which the protocol fixed before the first vote."
    )
    models = [[model["letter"], model["place"]] for model in results["models"]]
    warning = [macros.paragraph(partial_warning(results))] if results["partial"] else []
    overview = [
        macros.picture(url, "Share of votes for each model. " + " ".join(shares)),
        macros.paragraph(note),
        macros.table("Models", ["model", "sample set"], models),
        macros.paragraph(f"Protocol: `{results['protocol_sha256']}`"),
    ]
    preferences = [_table("Preferences over all prompts", PREFERENCES, results["preferences"])]
    if caution := chance_warning(results):
        preferences.append(macros.paragraph(caution))
    sections = [section("result", "Result", *warning, *overview), section("preferences", "Preferences", *preferences)]
    if results["strengths"]:
        strengths = _table("Strength of each model", STRENGTHS, results["strengths"])
        sections.append(section("strengths", "Strengths", strengths))
    if results["by_category"]:
        by_category = _table("Preferences by category", PREFERENCES, results["by_category"])
        advice = "One interval in twenty misses its true value by chance, so treat categories as leads, not as results."
        sections.append(section("categories", "Categories", by_category, macros.paragraph(advice)))
    raters = _table("Progress and consistency of the raters", RATERS, results["raters"])
    sections.append(section("raters", "Raters", raters, macros.paragraph(summarise_raters(results))))
    return render_page(f"{results['name']}: {'partial ' if results['partial'] else ''}results", sections)


def _table(caption: str, columns: Columns, rows: list[dict[str, Any]]) -> Markup:
    cells = [[cell(row) for _, cell in columns] for row in rows]
    return macros.table(caption, [heading for heading, _ in columns], cells)
