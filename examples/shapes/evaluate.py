"""Evaluate both phases of the demo in one process, so that libraries are imported only once."""

from pathlib import Path

from evaluation.__main__ import run as evaluation
from evaluation.units import workers_kept
from examples.shapes.adherence import judge_phases, write_prompts
from examples.shapes.demo import SIDES
from shards.base.errors import console
from train.export.pipeline import export

CONFIG = Path(__file__).parent / "configs" / "evaluate.yaml"


def run(arguments: list[str]) -> None:
    """Sample the fixed prompts from both phases, compute metrics, judge the images, and export the final model.

    Args:
        arguments: the demo's folder, and options for both calls of `evaluation watch`.
    """
    folder, options = Path(arguments[0]), arguments[1:]
    prompts = folder / "prompts.json"
    write_prompts(prompts)
    with workers_kept():
        for phase, side in SIDES.items():
            reference = folder / f"reference-{side}"
            words = ["watch", str(folder / phase), "--config", str(CONFIG), "--prompts.file", str(prompts)]
            words += ["--sampling.size", f"{side}x{side}", "--reference.size", f"{side}x{side}"]
            words += ["--reference.pictures", str(folder / "tars"), "--reference.place", str(reference), *options]
            print(f"$ python -m evaluation {' '.join(words)}", flush=True)
            evaluation(words)
    judge_phases(folder)
    print(export([str(folder / "phase2")]))


main = console(run)

if __name__ == "__main__":
    main()
