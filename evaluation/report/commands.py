"""The commands `report` and `compare`, which read what runs and evaluations have written."""

import argparse
from itertools import takewhile

from evaluation.report.page import ReportConfig, render
from evaluation.report.runs import compare, read_runs
from shards.base.config import load_config
from shards.base.durable import write_output
from shards.base.errors import RequestError


def report(arguments: list[str]) -> None:
    """Write one HTML page about one or more runs: losses, metrics, images, speed, cost and data.

    examples:
      python -m evaluation report runs/phase1 runs/phase2
      python -m evaluation report runs/a runs/b --output runs/report.html --price_per_hour 2.5
    """
    names = list(takewhile(lambda word: not word.startswith("-"), arguments))
    config = load_config(ReportConfig, None, arguments[len(names) :], "evaluation report RUN…", report.__doc__)
    if not names:
        raise RequestError(
            "evaluation report needs at least one run. Name the runs before all options, as in `python -m evaluation "
            "report runs/phase1 runs/phase2`."
        )
    runs = read_runs(names)
    page = render(runs, config, f"Report on {', '.join(run.name for run in runs)}")
    write_output(config.output, page.encode())
    print(config.output)


def compare_runs(arguments: list[str]) -> None:
    """Print the newest metrics of two runs, one below the other. Metrics with different ids are not compared."""
    epilog = "example: python -m evaluation compare runs/a runs/b"
    parser = argparse.ArgumentParser("python -m evaluation compare", description=compare_runs.__doc__, epilog=epilog)
    parser.add_argument("runs", nargs=2, metavar="RUN", help="run folder, or URL such as s3://bucket/phase2")
    print(compare(*read_runs(parser.parse_args(arguments).runs)))
