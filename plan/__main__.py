"""Estimate the days, cost and storage of a training run. `--out` also writes JSON and a plot.

examples:
  python -m plan --gpus 64
  python -m plan --config configs/sana/plan.yaml --gpu.price_per_hour 2.5 --out runs/plan
  python -m plan --compare configs/plan/h100.yaml configs/plan/h200.yaml
  python -m plan --memory configs/phase1.yaml configs/phase2.yaml
"""

import shards.base.interrupt  # noqa: F401

# isort: split

import argparse
from dataclasses import asdict
from pathlib import Path

from plan.config import Plan
from plan.report import Report, make_report
from plan.text import render, render_comparison
from shards.base.config import load_config
from shards.base.durable import canonical_json, write_output
from shards.base.errors import RequestError, console
from shards.base.store import parse_local

PROG = "plan"


def run(arguments: list[str]) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(f"python -m {PROG}", description=__doc__, allow_abbrev=False, formatter_class=raw)
    parser.add_argument("--config", default="configs/plan.yaml", help="plan file; override any field with --a.b VALUE")
    parser.add_argument("--gpus", nargs="?", help="GPU count to add to the table and highlight")
    parser.add_argument(
        "--compare", nargs="+", default=[], help="more plan files to compare with; overrides do not apply to them"
    )
    parser.add_argument(
        "--memory",
        nargs="+",
        default=[],
        type=Path,
        help="training configs; print only the memory that they need on each GPU (minutes per compiled config)",
    )
    parser.add_argument("--out", help="folder to write plan.txt, plan.json and plan.png to")
    options, overrides = parser.parse_known_args(arguments)
    overrides += ["--gpus", options.gpus] if options.gpus else []
    out = options.out and parse_local(options.out)
    plans = [load_config(Plan, options.config, overrides, PROG)]
    if options.memory and (options.compare or options.out):
        raise RequestError("--memory prints only a table of memory, so it cannot be combined with --compare or --out.")
    if options.memory:
        from plan.memory import memory_report

        print(memory_report(plans[0], options.memory))
        return
    plans += [load_config(Plan, path, [], PROG) for path in options.compare]
    reports = [make_report(plan) for plan in plans]
    text = "\n\n".join([*map(render, reports), *([render_comparison(reports)] if options.compare else [])])
    if out:
        write(out, text, reports)
    print(text)
    if out:
        print(f"Wrote plan.txt, plan.json and plan.png to {out}")


def write(folder: Path, text: str, reports: list[Report]) -> None:
    """Write plan.txt, plan.json and plan.png, each atomically.

    Raises:
        RequestError: the folder cannot be created, or it is not writable.
    """
    from plan.figure import draw

    plans = []
    for report in reports:
        facts = [{**asdict(fact), "assumed": fact.assumed} for fact in report.facts]
        plans.append({**asdict(report), "plan": report.plan.model_dump(mode="json"), "facts": facts})
    files = {"plan.txt": text.encode(), "plan.json": canonical_json({"plans": plans}), "plan.png": draw(reports)}
    for name, data in files.items():
        write_output(folder / name, data)


main = console(run)

if __name__ == "__main__":
    main()
