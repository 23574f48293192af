"""The commands `sample`, `score` and `watch`, which draw images and compute metrics."""

import sys
from pathlib import Path

from evaluation.config import EvaluateConfig, WatchConfig
from evaluation.metrics.table import MetricName
from evaluation.report.runs import step_place
from evaluation.sampling.job import draw_sets
from evaluation.sampling.model import choose_step, is_run, prepare_model
from evaluation.sampling.prompts import prompts_sha256, read_prompts
from evaluation.sampling.sets import read_set
from evaluation.scoring import check_measurable, choose_metrics, format_metrics, score
from evaluation.units import workers_kept
from evaluation.watch.follow import Follower, read_schedule
from evaluation.watch.tracker import log_remaining_results, open_tracker
from shards.base.config import load_from_args
from shards.base.errors import RequestError
from shards.base.store import absolute_place, parse_place
from shards.open import open_store
from train.run.recorded import run_config


def sample(arguments: list[str]) -> None:
    """Draw images for every prompt and sampling setting. If the command is interrupted, run it again to continue.

    examples:
      python -m evaluation sample --config configs/evaluate.yaml --model runs/phase2 --prompts.file prompts.txt
      python -m evaluation sample --config configs/evaluate.yaml --model runs/phase2 --sampling.guidance 1,3,8
    """
    config = load_from_args(EvaluateConfig, arguments, "evaluation sample", sample.__doc__)
    draw(config, *choose_output(config))


def score_sets(arguments: list[str]) -> None:
    """Draw missing images, compute the metrics of every sample set, print them and write metrics.json.

    examples:
      python -m evaluation score --config configs/evaluate.yaml --model runs/phase2 --prompts.file prompts.txt
      python -m evaluation score --config configs/evaluate.yaml --model runs/phase2 --extractors.inception.weights FILE
    """
    config = load_from_args(EvaluateConfig, arguments, "evaluation score", score_sets.__doc__)
    names = choose_metrics(config.metrics, config.extractors, config.reference)
    draw_and_score(config, names, *choose_output(config))


def watch(arguments: list[str]) -> None:
    """Sample and score each checkpoint of a run as it appears, while training continues.

    examples:
      python -m evaluation watch runs/phase2 --config configs/evaluate.yaml --prompts.file prompts.txt --every 10000
      python -m evaluation watch s3://bucket/phase2 --config configs/evaluate.yaml --once true
    """
    if arguments and not arguments[0].startswith("-"):
        arguments = ["--model", *arguments]
    config = load_from_args(WatchConfig, arguments, "evaluation watch RUN", watch.__doc__)
    if config.step is not None:
        raise RequestError(
            "evaluation watch does not accept --step, because it evaluates many checkpoints. Select them with --every "
            "and --until."
        )
    names = choose_metrics(config.metrics, config.extractors, config.reference)
    place, output = absolute_place(parse_place(config.model)), base_place(config)
    run = open_store(place)
    read_schedule(run)  # fails early if the folder is not a run
    settings = config.model_dump(mode="json", include={"weights", "sampling", "extractors", "reference"})
    if output != place:
        settings["run"] = str(place)  # another run may share the output
    Follower(
        run=run,
        output=output,
        config=config,
        weights=config.weights,
        settings=settings | {"metrics": names, "prompts": prompts_sha256(read_prompts(config.prompts))},
        evaluate=lambda step, place: draw_and_score(config, names, step, place),
        log_step=open_tracker(run, output),
        log_remaining=lambda: log_remaining_results(run, config.model),
    ).follow()


def draw_and_score(config: EvaluateConfig, names: list[MetricName], step: int | None, output: Path | str) -> None:
    """Draw the images of every setting from one checkpoint, compute their metrics and print them."""
    num_prompts, sampling = len(read_prompts(config.prompts)), config.sampling
    check_measurable(names, num_prompts, sampling.images_per_prompt, sampling.size, config.extractors, config.reference)
    with workers_kept():
        for place in draw(config, step, output):
            rows = score(read_set(place), names, config.extractors, config.reference, config.workers)
            print(f"{place}\n{format_metrics(rows)}", flush=True)


def draw(config: EvaluateConfig, step: int | None, output: Path | str) -> list[Path | str]:
    """Draw the images of every setting, and return where each sample set is stored."""
    prompts = read_prompts(config.prompts)
    warn_about_size(config.model, config.sampling.size)
    trusted = config.trust_remote_code
    model = prepare_model(config.model, step, config.weights, open_store(output), trusted)
    places = draw_sets(model, prompts, config.sampling, output, config.workers, trusted)
    source = model.name if model.step is None else f"{model.name} at step {model.step}"
    for place in places:
        print(f"{place}: {len(prompts) * config.sampling.images_per_prompt} images of {source}", flush=True)
    return places


def warn_about_size(name: str, size: str) -> None:
    """Print a warning if the model is a run that was not trained on images of this size."""
    # the run itself may be gone, since its export is enough to go on
    if not is_run(name) or (run := open_store(name)).size("config.yaml") is None:
        return
    trained = dict.fromkeys(stream["bucket"] for stream in run_config(run)["data"]["streams"])
    if size not in trained:
        print(
            f"warning: {name} was trained on images of {', '.join(trained)}, but images of {size} are drawn. Set "
            f"--sampling.size to a size it was trained on.",
            file=sys.stderr,
        )


def base_place(config: EvaluateConfig) -> Path | str:
    """Return the folder or URL that contains evaluations/: `output` if it is set, otherwise the run."""
    return absolute_place(config.output or parse_place(config.model))


def choose_output(config: EvaluateConfig) -> tuple[int | None, Path | str]:
    """Return the step to sample, and the folder or URL for its sample sets.

    In a run's own folder, which is named after the step, the newest step is chosen only here, because the trainer may
    save another checkpoint at any time. With `output`, `prepare_model` chooses it if it is not set.
    """
    if config.output is not None:
        return config.step, base_place(config)
    if not is_run(config.model):
        raise RequestError(
            f"{config.model} is not a run folder here. For an export or a model on the Hub, choose a location for the "
            f"images with --output."
        )
    step = config.step if config.step is not None else choose_step(open_store(config.model), None)
    return step, step_place(base_place(config), step, config.weights)
