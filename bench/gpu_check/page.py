"""The Markdown report: failed checks, rates next to those of other files, and where the time goes."""

from collections.abc import Iterator
from typing import Any

from bench.gpu_check.findings import RATE, Parts, Row
from bench.kit.common import table
from plan.config import GPU_KINDS
from plan.measured import BenchFile, Measurement, Rate, matches_gpu_kind, read_rates


def page(bench: BenchFile, others: list[str], seconds: float) -> str:
    """Write the report of a check.

    Args:
        others: benchmark files, such as an earlier check's, whose rates are listed next to the measured ones.

    Raises:
        RequestError: a file in `others` is missing or is not a benchmark file.
    """
    parts = bench.details
    sections = [
        f"# GPU check: {bench.device}\n\n`{bench.command}`, {bench.date}, {seconds:.0f} s.",
        verdict(parts),
        *filter(None, (make(parts) for make in (unfinished, wrong))),
        rates(bench, others),
        *filter(None, (make(parts) for make in (step, memory))),
        *tables(parts),
    ]
    return "\n\n".join(sections) + "\n"


def verdict(parts: Parts) -> str:
    """Summarise the check in a sentence."""
    checks = [line for part in parts.values() for line in part["checks"]]
    done = sum(part["outcome"] == "done" for part in parts.values())
    held = sum(line["right"] for line in checks)
    return f"**{held} of {len(checks)} checks hold; {done} of {len(parts)} parts finished.**"


def unfinished(parts: Parts) -> str | None:
    """List unfinished parts with the end of their output, or return None."""
    rest = [(name, part) for name, part in parts.items() if part["outcome"] != "done"]
    outcomes = [f"**{name}**, after {part['seconds']:.0f} s:\n\n```\n{part['outcome']}\n```" for name, part in rest]
    return "\n\n".join(["## Unfinished parts", *outcomes]) if rest else None


def wrong(parts: Parts) -> str | None:
    """Tabulate the checks that do not hold, or return None."""
    rows = [(name, *line) for name, *line, right in checked(parts) if not right]
    return "## Failed checks\n\n" + table(("part", "check", "value", "maximum"), rows) if rows else None


def checked(parts: Parts) -> Iterator[tuple[Any, ...]]:
    """Yield every check: part, description, value, maximum, whether it holds."""
    for name, part in parts.items():
        for line in part["checks"]:
            yield name, line["what"], f"{line['value']:.3g}", f"{line['at_most']:.3g}", line["right"]


def gpu_kind(device: str) -> str:
    """Return the planner's kind of a GPU with this name, or the name itself."""
    return next((kind for kind in GPU_KINDS if matches_gpu_kind(device, kind)), device)


def rates(bench: BenchFile, others: list[str]) -> str:
    """Tabulate each stage's best rate on this GPU next to that of other benchmark files."""
    found = read_rates(others, gpu_kind(bench.device))
    rows = [rate_row(item, found.of(item.stage, item.bucket)) for item in bench.measurements]
    text = "## Rates\n\n" + table(
        ("stage", "bucket", "microbatch", "per second", "compared with", "ratio", "source"), rows
    )
    aside = f"\n\nSkipped, measured on a different GPU kind: {', '.join(found.skipped_files)}." * bool(
        found.skipped_files
    )
    return text + aside


def rate_row(item: Measurement, others: list[Rate]) -> list[object]:
    """Format a rate next to the same rate from other files.

    Args:
        others: rates from other files, sorted by number of GPUs. The first one is shown.
    """
    found = item.images_per_second_per_gpu
    start = [item.stage, item.bucket or "", item.microbatch_size or "", f"{found:,.1f}"]
    if not others:
        return [*start, "", "", ""]
    per_gpu = others[0].images_per_second_per_gpu
    return [*start, f"{per_gpu:,.1f}", f"{found / per_gpu:.0%}", others[0].source]


def step(parts: Parts) -> str | None:
    """Break down the time of a step by kernel class, and compare it with the arithmetic at the matrix rate."""
    part = parts.get("profile", {})
    whole, rows = part.get("figures", {}).get("step"), part.get("tables", {}).get("kernels")
    if not whole or not rows:
        return None
    total = 1e3 * whole["seconds"]
    ideal = sum(row["at_the_matrix_rate_ms"] for row in rows)
    cells = [
        (
            row["what"],
            row["launches"],
            f"{row['ms']:.2f}",
            f"{row['ms'] / total:.1%}",
            f"{row['at_the_matrix_rate_ms']:.2f}",
            f"{(row['ms'] - row['at_the_matrix_rate_ms']) / total:.1%}",
        )
        for row in sorted(rows, key=lambda row: -row["ms"])
    ]
    head = ["kernels", "launches", "ms", "share of the step", "at the matrix rate, ms", "share lost"]
    return (
        f"## Time of a step\n\nA step of {whole['images']} images takes {total:.1f} ms, "
        f"{whole['images'] / whole['seconds']:.1f} images/s. Its arithmetic takes {ideal:.1f} ms at the "
        f"{whole['matrix TFLOP/s']:.4g} TFLOP/s of a large bfloat16 product in the same run: **{ideal / total:.1%} of "
        f"the limit**.\n\n" + table(head, cells)
    )


def memory(parts: Parts) -> str | None:
    """Report the memory of the profiled step."""
    figures = parts.get("profile", {}).get("figures", {})
    if "memory GiB" not in figures:
        return None
    most, weights = figures["memory GiB"], figures["weights and optimizer GiB"]
    return f"Peak memory was {most:.2f} GiB, of which weights, gradients and optimizer take {weights:.2f} GiB."


def tables(parts: Parts) -> Iterator[str]:
    """Yield the remaining tables, with rates as shares of the matrix rate, the figures and all checks."""
    matrix_rate = parts.get("machine", {}).get("figures", {}).get(RATE.format("bfloat16"))
    for name, part in parts.items():
        for title, rows in part["tables"].items():
            if title != "kernels":
                if matrix_rate:
                    rows = [row | share_of(row, matrix_rate) for row in rows]
                head = list(dict.fromkeys(key for row in rows for key in row))
                yield f"## {title.capitalize()} ({name})\n\n" + table(
                    head, ([cell(row.get(k)) for k in head] for row in rows)
                )
    figures = [(name, key, cell(value)) for name, part in parts.items() for key, value in part["figures"].items()]
    yield "## Figures\n\n" + table(("part", "figure", "value"), figures)
    yield "## All checks\n\n" + table(("part", "check", "value", "maximum", "holds"), checked(parts))


def share_of(row: Row, matrix_rate: float) -> Row:
    """Return a further cell for a row with a rate in TFLOP/s: its share of a large bfloat16 product's."""
    tflops = row.get("tflops")
    return {"share of the matrix rate": f"{tflops / matrix_rate:.1%}"} if isinstance(tflops, float) and tflops else {}


def cell(value: Any) -> str:
    """Format a value, numbers with four significant digits."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(cell, value))
    return "" if value is None else str(value)
