"""Sample a model, compute metrics with confidence intervals, and report and compare the results.

examples:
  python -m evaluation score --config configs/evaluate.yaml --model runs/phase2 --prompts.file prompts.txt
  python -m evaluation report runs/phase1 runs/phase2

commands, each with its own --help:
  python -m evaluation sample      sample images for a list of prompts
  python -m evaluation score       draw images, and compute metrics against a reference
  python -m evaluation watch       sample and score each checkpoint of a run while training continues
  python -m evaluation report      write one HTML page about one or more runs
  python -m evaluation compare     print the newest metrics of two runs
  python -m evaluation study       compare sample sets in a blind study with human raters
"""

import shards.base.interrupt  # noqa: F401

# isort: split

from importlib import import_module

from shards.base.config import parse_subcommand
from shards.base.errors import console

COMMANDS = {
    "sample": "evaluation.commands:sample",
    "score": "evaluation.commands:score_sets",
    "watch": "evaluation.commands:watch",
    "report": "evaluation.report.commands:report",
    "compare": "evaluation.report.commands:compare_runs",
    "study": "evaluation.study.__main__:run",
}
"""Command → module and function. Only the module of the chosen command is imported, because torch and diffusers, which
only the first three need, take seconds."""


def run(arguments: list[str]) -> None:
    """Run `python -m evaluation` with these arguments."""
    command, rest = parse_subcommand(COMMANDS, arguments, "evaluation", __doc__)
    module, _, function = COMMANDS[command].partition(":")
    getattr(import_module(module), function)(rest)


main = console(run)

if __name__ == "__main__":
    main()
