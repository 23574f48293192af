"""results.json, results.html, results.png, and a table for the terminal."""

import base64
import html
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

from evaluation.study.output.figure import draw, model_shares
from shards.base.durable import sealed_json, write_atomically

TEMPLATE = Path(__file__).with_name("results.html")


def write_results(results: dict[str, Any], folder: Path) -> None:
    """All three, each atomically."""
    picture = draw(results)
    write_atomically(folder / "results.png", picture)
    write_atomically(folder / "results.html", page(results, picture).encode())
    write_atomically(folder / "results.json", sealed_json(results))


def render(results: dict[str, Any]) -> str:
    lines = [f"{model['letter']}: {model['place']}" for model in results["models"]]
    for row in results["preferences"]:
        lines.append(
            f"{row['question']:<12} {row['models'][0]} over {row['models'][1]}: {row['preference']:6.1%} "
            f"[{row['low']:.1%}, {row['high']:.1%}], {row['votes']} votes of {row['raters']} raters on "
            f"{row['prompts']} prompts: {row['verdict']}"
        )
    for row in results["strengths"]:
        lines.append(
            f"{row['question']:<12} {row['model']} over the others: {row['share']:6.1%} "
            f"[{row['share_low']:.1%}, {row['share_high']:.1%}]"
        )
    lines += [f"95 % intervals of {results['estimand']}.", about_raters(results)]
    if results["partial"]:
        lines.append(partial(results))
    return "\n".join(lines)


def about_raters(results: dict[str, Any]) -> str:
    """Who was left out, and how consistent the others were."""
    raters = results["raters"]
    out = [str(rater["number"]) for rater in raters if rater["excluded"]]
    same, again = (sum(rater[name] for rater in raters) for name in ("repeats_same", "repeats_answers"))
    right, golds = (sum(rater[name] for rater in raters) for name in ("gold_right", "gold_answers"))
    rule = results["exclude_below"]
    left = (
        f"Left out by the protocol's rule (below {rule:.0%} of gold answers right): rater {', '.join(out)}."
        if out
        else "No rater was left out."
    )
    shown = [f"Gold answers right: {right} of {golds}.", f"Answers to repeats the same: {same} of {again}."]
    return " ".join([left, *shown])


def partial(results: dict[str, Any]) -> str:
    """What to make of a study that goes on."""
    return (
        f"PARTIAL: {results['answers']} of {results['planned']} planned answers. A study that is stopped once its "
        f"result pleases finds differences that are not there."
    )


def page(results: dict[str, Any], picture: bytes) -> str:
    names = {model["letter"]: f"{model['letter']}: {model['place']}" for model in results["models"]}
    said = [
        f"{results['questions'][question]} "
        + "; ".join(f"{letter} {_range(*shares)}" for letter, shares in model_shares(results, question).items())
        for question in results["questions"]
    ]
    values = {
        "name": html.escape(results["name"]),
        "partial": f'<p class="partial">{html.escape(partial(results))}</p>' if results["partial"] else "",
        "models": "".join(f"<li>{html.escape(name)}</li>" for name in names.values()),
        "picture": base64.b64encode(picture).decode(),
        "alt": html.escape("Share of votes for each model. " + " ".join(said)),
        "preferences": _preferences("Preferences", results["preferences"]),
        "strengths": _strengths(results["strengths"]),
        "categories": _preferences("By category", results["by_category"]) + _by_chance(results["by_category"]),
        "raters": _raters(results),
        "estimand": html.escape(results["estimand"]),
        "margin": f"{results['margin']:g}",
        "protocol": results["protocol_sha256"],
    }
    return Template(TEMPLATE.read_text()).substitute(values)


def _preferences(title: str, rows: Sequence[dict[str, Any]]) -> str:
    head = [
        "question",
        "category",
        "models",
        "first preferred",
        "95 % interval",
        "won, tied, lost",
        "raters",
        "prompts",
    ]
    cells = [
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
    return _table(title, [*head, "result"], cells)


def _by_chance(rows: Sequence[dict[str, Any]]) -> str:
    text = "One interval in twenty misses what it estimates by chance: categories are a place to look, not results."
    return f"<p>{text}</p>" if rows else ""


def _strengths(rows: Sequence[dict[str, Any]]) -> str:
    head = ["question", "model", "preferred to another", "95 % interval", "strength (log odds)", "95 % interval"]
    cells = [
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
    return _table("Strengths", head, cells)


def _raters(results: dict[str, Any]) -> str:
    head = ["rater", "done", "gold right", "repeats the same", "ties", "median seconds", "counted"]
    cells = [
        [
            rater["number"],
            f"{rater['done']} of {rater['showings']}",
            f"{rater['gold_right']} of {rater['gold_answers']}",
            f"{rater['repeats_same']} of {rater['repeats_answers']}",
            f"{rater['ties']} of {rater['answers']}",
            "" if rater["median_seconds"] is None else f"{rater['median_seconds']:.1f}",
            "no" if rater["excluded"] else "yes",
        ]
        for rater in results["raters"]
    ]
    return _table("Raters", head, cells) + f"<p>{html.escape(about_raters(results))}</p>"


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    if not rows:
        return ""
    heads = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in head)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return (
        f'<h2>{html.escape(title)}</h2><div class="wide" tabindex="0" role="region" aria-label="{html.escape(title)}">'
        f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _range(value: float, low: float, high: float) -> str:
    return f"{value:.1%} ({low:.1%} to {high:.1%})"
