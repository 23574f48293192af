"""Write a study's results: results.json, results.html, results.png, and a summary for the terminal."""

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evaluation.report.markup import render_page
from evaluation.study.figure import draw, model_shares
from shards.base.durable import sealed_json, write_atomically

PREFERENCE_HEADER = (
    "question",
    "category",
    "models",
    "first preferred",
    "95 % interval",
    "won, tied, lost",
    "raters",
    "prompts",
    "result",
)
STRENGTH_HEADER = (
    "question",
    "model",
    "preferred to each other model",
    "95 % interval",
    "strength (log odds)",
    "95 % interval",
)
RATER_HEADER = ("rater", "done", "gold correct", "repeats consistent", "ties", "median seconds", "counted")


def write_results(results: dict[str, Any], folder: Path) -> None:
    """Write the three files, each atomically."""
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
            f"[{row['low']:.1%}, {row['high']:.1%}], {row['votes']} votes by {row['raters']} raters on "
            f"{row['prompts']} prompts: {row['verdict']}"
        )
    for row in results["strengths"]:
        lines.append(
            f"{row['question']:<12} {row['model']} over the others: {row['share']:6.1%} "
            f"[{row['share_low']:.1%}, {row['share_high']:.1%}]"
        )
    lines += [f"Brackets are 95 % intervals of {results['estimand']}.", summarise_raters(results)]
    if results["partial"]:
        lines.append(partial_warning(results))
    return "\n".join(lines)


def summarise_raters(results: dict[str, Any]) -> str:
    """Summarise which raters were excluded, and how well all raters answered gold items and repeats."""
    raters = results["raters"]
    excluded = [str(rater["number"]) for rater in raters if rater["excluded"]]
    consistent, repeats = (sum(rater[name] for rater in raters) for name in ("repeats_same", "repeats_answers"))
    correct, golds = (sum(rater[name] for rater in raters) for name in ("gold_right", "gold_answers"))
    if excluded:
        rule = f"less than {results['exclude_below']:.0%} of gold answers correct"
        exclusion = f"Excluded by the protocol's rule ({rule}): rater {', '.join(excluded)}."
    else:
        exclusion = "No rater was excluded."
    return (
        f"{exclusion} Gold answers correct: {correct} of {golds}. "
        f"Repeats answered consistently: {consistent} of {repeats}."
    )


def partial_warning(results: dict[str, Any]) -> str:
    """Explain why an incomplete study is not a result."""
    return (
        f"PARTIAL: {results['answers']} of {results['planned']} planned answers. A study that is stopped as soon as "
        f"its result looks good finds differences that do not exist."
    )


def page(results: dict[str, Any], chart: bytes) -> str:
    """Render results.html with the chart embedded in it.

    Args:
        chart: PNG of the chart.
    """
    shares = []
    for question, text in results["questions"].items():
        by_model = [f"{letter} {_share(*ends)}" for letter, ends in model_shares(results, question).items()]
        shares.append(f"{text} {'; '.join(by_model)}")
    return render_page(
        "study/results.html",
        name=results["name"],
        partial=partial_warning(results) if results["partial"] else None,
        models=[f"{model['letter']}: {model['place']}" for model in results["models"]],
        chart=base64.b64encode(chart).decode(),
        description="Share of votes for each model. " + " ".join(shares),
        estimand=results["estimand"],
        margin=f"{results['margin']:g}",
        preference_header=PREFERENCE_HEADER,
        preferences=_preference_rows(results["preferences"]),
        categories=_preference_rows(results["by_category"]),
        strength_header=STRENGTH_HEADER,
        strengths=_strength_rows(results["strengths"]),
        rater_header=RATER_HEADER,
        raters=_rater_rows(results["raters"]),
        rater_summary=summarise_raters(results),
        protocol=results["protocol_sha256"],
    )


def _preference_rows(rows: Sequence[dict[str, Any]]) -> list[list[Any]]:
    return [
        [
            row["question"],
            row["category"] or "all",
            " over ".join(row["models"]),
            f"{row['preference']:.1%}",
            f"{row['low']:.1%} to {row['high']:.1%}",
            f"{row['won']}, {row['tied']}, {row['lost']}",
            row["raters"],
            row["prompts"],
            row["verdict"],
        ]
        for row in rows
    ]


def _strength_rows(rows: Sequence[dict[str, Any]]) -> list[list[Any]]:
    return [
        [
            row["question"],
            row["model"],
            f"{row['share']:.1%}",
            f"{row['share_low']:.1%} to {row['share_high']:.1%}",
            f"{row['value']:+.3f}",
            f"{row['low']:+.3f} to {row['high']:+.3f}",
        ]
        for row in rows
    ]


def _rater_rows(raters: Sequence[dict[str, Any]]) -> list[list[Any]]:
    return [
        [
            rater["number"],
            f"{rater['done']} of {rater['showings']}",
            f"{rater['gold_right']} of {rater['gold_answers']}",
            f"{rater['repeats_same']} of {rater['repeats_answers']}",
            f"{rater['ties']} of {rater['answers']}",
            "" if rater["median_seconds"] is None else f"{rater['median_seconds']:.1f}",
            "no" if rater["excluded"] else "yes",
        ]
        for rater in raters
    ]


def _share(value: float, low: float, high: float) -> str:
    return f"{value:.1%} ({low:.1%} to {high:.1%})"
