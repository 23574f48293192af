"""A model → pictures → metrics with their intervals.

examples:
  python -m evaluate sample --config configs/evaluate.yaml --model runs/phase2 --prompts.file prompts.txt
  python -m evaluate sample --config configs/evaluate.yaml --model runs/phase2 --sampling.guidance 1,3,8
  python -m evaluate score --config configs/evaluate.yaml --model runs/phase2 --extractors.inception.weights FILE

commands, each with a --help of its own:
  python -m evaluate sample      draw pictures; the same command again resumes
  python -m evaluate score       the same, and the metrics of each sample set against the reference
  python -m evaluate study       a blind study of two or more sample sets, with commands of its own
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from evaluate.config import EvaluateConfig
from evaluate.sampling.job import below, draw_sets, read_set
from evaluate.sampling.model import chosen_step, is_run, make_ready
from evaluate.sampling.prompts import read_prompts
from evaluate.scoring import choose_metrics, score, table
from evaluate.study.__main__ import run as study
from shards.base.config import load_config
from shards.base.errors import RequestError, exit_code_of
from shards.base.store import parse_place
from shards.open import open_store


def run(arguments: list[str]) -> None:
    """Dispatch on the first word."""
    command, *rest = arguments or ["--help"]
    if command in ("-h", "--help"):
        parser = argparse.ArgumentParser(
            "python -m evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        parser.parse_args(["--help"])
    if command not in COMMANDS:
        raise RequestError(f"python -m evaluate has no command {command}; it has {', '.join(COMMANDS)}.")
    COMMANDS[command](rest)


def sample(arguments: list[str]) -> None:
    """Draw the pictures of every setting."""
    draw(read_config(arguments, "evaluate sample"))


def score_sets(arguments: list[str]) -> None:
    """Draw what is missing of every setting's pictures, and print and write each set's metrics."""
    config = read_config(arguments, "evaluate score")
    names = choose_metrics(config.metrics, config.extractors)
    for place in draw(config):
        rows = score(read_set(place), names, config.extractors, config.reference, config.workers)
        print(f"{place}\n{table(rows)}")


def draw(config: EvaluateConfig) -> list[Path | str]:
    """Draw the pictures of every setting; returns where each sample set is."""
    prompts = read_prompts(config.prompts)
    output = output_of(config)
    model = make_ready(config.model, config.step, config.weights, open_store(output))
    places = draw_sets(model, prompts, config.sampling, output, config.workers)
    for place in places:
        print(f"{place}: {len(prompts) * config.sampling.images_per_prompt} pictures")
    return places


def read_config(arguments: list[str], prog: str) -> EvaluateConfig:
    """The config file with its overrides."""
    parser = argparse.ArgumentParser(prog=prog, add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    options, overrides = parser.parse_known_args(arguments)
    return load_config(EvaluateConfig, options.config, overrides, prog, __doc__)


def output_of(config: EvaluateConfig) -> Path | str:
    """Where the pictures of a config's model go; a local folder as an absolute path, for workers.

    Raises:
        RequestError: none is given for a model that is no run.
    """
    place = config.output
    if place is None and not is_run(config.model):
        raise RequestError(f"Say where the pictures of {config.model} go, with --output: it is no run folder.")
    if place is None:
        step = config.step if config.step is not None else chosen_step(open_store(config.model), None)
        place = below(parse_place(config.model), f"evaluations/step-{step:08d}-{config.weights}")
    return place.absolute() if isinstance(place, Path) else place


COMMANDS: dict[str, Callable[[list[str]], object]] = {"sample": sample, "score": score_sets, "study": study}


def main() -> None:
    """Console entry point."""
    sys.exit(exit_code_of(lambda: run(sys.argv[1:])))


if __name__ == "__main__":
    main()
