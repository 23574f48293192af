"""A model → pictures → metrics with their intervals.

examples:
  python -m evaluation score --config configs/evaluate.yaml --model runs/phase2 --prompts.file prompts.txt
  python -m evaluation report runs/phase1 runs/phase2

commands, each with a --help of its own:
  python -m evaluation sample      draw pictures; the same command again resumes
  python -m evaluation score       the same, and the metrics of each sample set against the reference
  python -m evaluation study       a blind study of two or more sample sets, with commands of its own
  python -m evaluation watch       the same for each checkpoint of a run as it appears, while training goes on
  python -m evaluation report      what is known of some runs, on one page
  python -m evaluation compare     the newest numbers of two runs
"""

import shards.base.interrupt  # noqa: F401

# isort: split

import argparse
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path

from evaluation.config import EvaluateConfig, WatchConfig
from evaluation.metrics.table import MetricName
from evaluation.report.compare import compare
from evaluation.report.page import ReportConfig, render
from evaluation.report.records import step_place
from evaluation.report.runs import read_runs
from evaluation.sampling.job import draw_sets, read_set
from evaluation.sampling.model import chosen_step, is_run, make_ready
from evaluation.sampling.prompts import prompts_sha256, read_prompts
from evaluation.scoring import check_measurable, choose_metrics, score, table
from evaluation.study.__main__ import run as study
from evaluation.watch.follow import Follower, read_wants
from evaluation.watch.tracker import open_tracker, tell_rest
from shards.base.config import load_config, load_from_args, parse_subcommand
from shards.base.durable import write_atomically
from shards.base.errors import RequestError, console
from shards.base.store import parse_place
from shards.open import open_store


def run(arguments: list[str]) -> None:
    command, rest = parse_subcommand(COMMANDS, arguments, "evaluation", __doc__)
    COMMANDS[command](rest)


def sample(arguments: list[str]) -> None:
    """Draw the pictures of every setting; the same command again resumes.

    examples:
      python -m evaluation sample --config configs/evaluate.yaml --model runs/phase2 --prompts.file prompts.txt
      python -m evaluation sample --config configs/evaluate.yaml --model runs/phase2 --sampling.guidance 1,3,8
    """
    config = load_from_args(EvaluateConfig, arguments, "evaluation sample", sample.__doc__)
    draw(config, config.step, output_of(config))


def score_sets(arguments: list[str]) -> None:
    """Draw what is missing of every setting's pictures, and print and write each set's metrics.

    examples:
      python -m evaluation score --config configs/evaluate.yaml --model runs/phase2 --prompts.file prompts.txt
      python -m evaluation score --config configs/evaluate.yaml --model runs/phase2 --extractors.inception.weights FILE
    """
    config = load_from_args(EvaluateConfig, arguments, "evaluation score", score_sets.__doc__)
    names = choose_metrics(config.metrics, config.extractors, config.reference)
    draw_and_score(config, names, config.step, output_of(config))


def watch(arguments: list[str]) -> None:
    """Pictures and metrics of each checkpoint of a run as it appears, while training goes on.

    examples:
      python -m evaluation watch runs/phase2 --config configs/evaluate.yaml --prompts.file prompts.txt --every 10000
      python -m evaluation watch s3://bucket/phase2 --config configs/evaluate.yaml --once true
    """
    named = ["--model", *arguments[:1]] if arguments and not arguments[0].startswith("-") else []
    config = load_from_args(WatchConfig, [*named, *arguments[len(named) // 2 :]], "evaluation watch RUN", watch.__doc__)
    if config.step is not None:
        raise RequestError(
            "evaluation watch follows many steps: choose them with --every and --until, not with --step."
        )
    names = choose_metrics(config.metrics, config.extractors, config.reference)
    run, output = open_store(config.model), base_of(config)
    read_wants(run)
    settings = config.model_dump(mode="json", include={"weights", "sampling", "extractors", "reference"})
    Follower(
        run=run,
        output=output,
        config=config,
        weights=config.weights,
        settings=settings | {"metrics": names, "prompts": prompts_sha256(read_prompts(config.prompts))},
        evaluate=lambda step, place: draw_and_score(config, names, step, place),
        track=open_tracker(run, output),
        tell_rest=lambda: tell_rest(run, config.model),
    ).follow()


def report(arguments: list[str]) -> None:
    """What is known of some runs, on one page.

    examples:
      python -m evaluation report runs/phase1 runs/phase2
      python -m evaluation report runs/a runs/b --output runs/report.html --price_per_hour 2.5
    """
    names = list(takewhile(lambda word: not word.startswith("-"), arguments))
    config = load_config(ReportConfig, None, arguments[len(names) :], "evaluation report RUN…", report.__doc__)
    if not names:
        raise RequestError(
            "evaluation report: name the runs first: `python -m evaluation report runs/phase1 runs/phase2`."
        )
    runs = read_runs(names)
    config.output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(config.output, render(runs, config, f"Report of {', '.join(run.name for run in runs)}").encode())
    print(config.output)


def compare_runs(arguments: list[str]) -> None:
    """The newest numbers of two runs, side by side."""
    epilog = "example: python -m evaluation compare runs/a runs/b"
    parser = argparse.ArgumentParser("python -m evaluation compare", description=compare_runs.__doc__, epilog=epilog)
    parser.add_argument("runs", nargs=2, metavar="RUN")
    print(compare(*read_runs(parser.parse_args(arguments).runs)))


def draw_and_score(config: EvaluateConfig, names: list[MetricName], step: int | None, output: Path | str) -> None:
    """Of every setting, a checkpoint's pictures and their metrics."""
    check_measurable(names, len(read_prompts(config.prompts)), config.sampling.size, config.reference)
    for place in draw(config, step, output):
        rows = score(read_set(place), names, config.extractors, config.reference, config.workers)
        print(f"{place}\n{table(rows)}", flush=True)


def draw(config: EvaluateConfig, step: int | None, output: Path | str) -> list[Path | str]:
    """Draw the pictures of every setting; returns where each sample set is."""
    prompts = read_prompts(config.prompts)
    trusted = config.trust_remote_code
    model = make_ready(config.model, step, config.weights, open_store(output), trusted)
    places = draw_sets(model, prompts, config.sampling, output, config.workers, trusted)
    for place in places:
        print(f"{place}: {len(prompts) * config.sampling.images_per_prompt} pictures", flush=True)
    return places


def base_of(config: EvaluateConfig) -> Path | str:
    """What holds evaluations/: the run, or the output that was given; a local one as an absolute path, for workers."""
    place = config.output or parse_place(config.model)
    return place.absolute() if isinstance(place, Path) else place


def output_of(config: EvaluateConfig) -> Path | str:
    """Where the pictures of a config's model go.

    Raises:
        RequestError: none is given for a model that is no run.
    """
    if config.output is not None:
        return base_of(config)
    if not is_run(config.model):
        raise RequestError(f"Say where the pictures of {config.model} go, with --output: it is no run folder.")
    step = config.step if config.step is not None else chosen_step(open_store(config.model), None)
    return step_place(base_of(config), step, config.weights)


COMMANDS: dict[str, Callable[[list[str]], object]] = {
    "sample": sample,
    "score": score_sets,
    "watch": watch,
    "report": report,
    "compare": compare_runs,
    "study": study,
}

main = console(run)

if __name__ == "__main__":
    main()
