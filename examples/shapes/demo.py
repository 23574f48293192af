"""`make demo`: the whole product on a picture world of its own, on a machine without a GPU.

    world → (HTTP) → tars → latents → phase 1 (64 px) → phase 2 (128 px) → evaluation → report

Each step is the command that a user would type, or this example's own. A step that is done is not done again when the
demo is interrupted and started anew; a demo that was finished starts from nothing.
"""

import argparse
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pyarrow.parquet as pq

from examples.shapes.adherence import check_adherence, judge_phases, write_prompts
from examples.shapes.report import write_report
from examples.shapes.serve import serve
from examples.shapes.world import NUM_PICTURES, metadata, plan_world, write_world
from shards.base.config import load_config
from shards.base.device import available_cores
from train.config import TrainConfig

CONFIGS = Path(__file__).parent / "configs"
ROWS_PER_TAR = 500
SIDES = {"phase1": 64, "phase2": 128}
SEED = 0
MOST_PROCESSES = 8
"""More than these would each have fewer than four pictures of phase 2's batch."""
SMALLEST_BATCH = 32
"""Phase 2's global batch, which the training processes share evenly."""
STEP_RATIO, LATER_SECONDS_RATIO = 1.55, 0.53
"""Time of a step of phase 2, and of the whole evaluation / of phase 1: measured on CPUs, and used for the estimate."""
ESTIMATE_AFTER = 10
"""Steps of phase 1 after which the demo estimates its total time."""


class Demo:
    """The demo's folder, its steps, and how long each took."""

    def __init__(self, folder: Path, num_pictures: int):
        self.folder = folder
        self.num_pictures = num_pictures
        self.timings = folder / "seconds.json"
        if (folder / "metrics.json").exists() and self.timings.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        found = json.loads(self.timings.read_text()) if self.timings.exists() else {"seconds": {}, "done": []}
        self.seconds: dict[str, float] = found["seconds"]
        self.done: list[str] = found["done"]

    def step(self, name: str, title: str, work: Callable[[], None]) -> None:
        """Do `work` unless an earlier start of this demo did."""
        number = f"[{STEPS.index(name) + 1}/{len(STEPS)}]"
        if name in self.done:
            print(f"{number} {title}: done before", flush=True)
            return
        print(f"\n{number} {title}", flush=True)
        started = time.monotonic()
        try:
            work()
            self.done.append(name)
        finally:  # time spent before an interruption counts as well
            self.seconds[name] = round(self.seconds.get(name, 0.0) + time.monotonic() - started, 1)
            self.timings.write_text(json.dumps({"seconds": self.seconds, "done": self.done}))
        print(f"{number} {title}: {self.seconds[name]:.0f} s", flush=True)

    def make_world(self) -> None:
        """Pictures on disk, as a web server would have them."""
        write_world(self.folder / "web", self.num_pictures, SEED)

    def download(self) -> None:
        """The pictures, over HTTP, into webdataset tars."""
        shutil.rmtree(self.folder / "tars", ignore_errors=True)
        with serve(self.folder / "web") as address:
            table = metadata(plan_world(self.num_pictures, SEED), address)
            pq.write_table(table, self.folder / "metadata.parquet")
            call(
                *("precompute.download", "--config", "configs/download.yaml"),
                *("--input", str(self.folder / "metadata.parquet"), "--output", str(self.folder / "tars")),
                *("--requests.allow_private_hosts", "true", "--rows_per_shard", str(ROWS_PER_TAR)),
            )

    def precompute(self) -> None:
        config = str(CONFIGS / "precompute.yaml")
        call("precompute", "--config", config, "--input", str(self.folder / "tars"), "--output", self.latents)

    def train(self, phase: int) -> None:
        """One phase of stage 2, launched as `make train` launches it."""
        run_dir = self.folder / f"phase{phase}"
        start = ["--init_from", str(self.folder / "phase1")] if phase == 2 else []
        config = CONFIGS / f"phase{phase}.yaml"
        processes = str(training_processes(available_cores()))  # the loss curve is the same on any number
        launch = ["train.launch", "--num_machines", "1", "--num_processes", processes]
        launch += ["--multi_gpu", "--main_process_port", "0"] if processes != "1" else []
        launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "--quiet"]
        arguments = ["--config", str(config), "--run_dir", str(run_dir), "--data.root", self.latents, *start]
        with self.estimate(run_dir / "metrics.jsonl") if phase == 1 else nullcontext():
            call(*launch, "-m", "train", *arguments, "--num_processes", processes)
        call("train", "export", str(run_dir))

    @contextmanager
    def estimate(self, metrics: Path) -> Iterator[None]:
        """Print how long the whole demo will take, once phase 1 has logged its first steps."""
        ended = threading.Event()
        earlier = sum(self.seconds.values())
        started = time.monotonic()

        def watch() -> None:
            while not ended.wait(0.5):
                if metrics.exists() and (lines := metrics.read_text().splitlines()):
                    line = json.loads(lines[0])
                    if line["step"] > ESTIMATE_AFTER:
                        return  # a resumed run, whose first steps were estimated before
                    spent = earlier + time.monotonic() - started
                    left = seconds_left(line["images_per_second"])
                    print(
                        f"the demo will take about {(spent + left) / 60:.0f} minutes in all ({spent / 60:.0f} so far): "
                        f"phase 1 trains {line['images_per_second']:.0f} images/s on this machine",
                        flush=True,
                    )
                    return

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()

    @property
    def latents(self) -> str:
        return str(self.folder / "latents")

    def evaluate(self) -> None:
        """Pictures of every fixed prompt from the checkpoints of both phases, metrics, and the judge's verdict."""
        prompts = self.folder / "prompts.json"
        write_prompts(prompts)
        for phase, side in SIDES.items():
            size, reference = f"{side}x{side}", str(self.folder / f"reference-{side}")
            call(
                *("evaluation", "watch", str(self.folder / phase), "--config", str(CONFIGS / "evaluate.yaml")),
                *("--prompts.file", str(prompts), "--sampling.size", size, "--reference.size", size),
                *("--reference.pictures", str(self.folder / "tars"), "--reference.place", reference),
            )
        judge_phases(self.folder)

    def report(self) -> None:
        write_report(self.folder, self.seconds)


STEPS = ("world", "download", "precompute", "phase1", "phase2", "evaluate")


def training_processes(cores: int) -> int:
    """Return how many processes train on `cores` CPU cores: as many as share phase 2's batch evenly."""
    return max(n for n in range(1, min(cores, MOST_PROCESSES) + 1) if SMALLEST_BATCH % n == 0)


def seconds_left(images_per_second: float) -> float:
    """Estimate the seconds from phase 1's first logged step to the demo's end.

    Args:
        images_per_second: rate of phase 1. The other steps are estimated from it by ratios measured on CPUs.
    """
    config = load_config(TrainConfig, CONFIGS / "phase1.yaml", [], "demo")
    phase_1 = (config.max_steps - ESTIMATE_AFTER) * config.global_batch_size / images_per_second
    return phase_1 * (1 + STEP_RATIO + LATER_SECONDS_RATIO)


def call(*arguments: str) -> None:
    """`python -m …`, its output shown as it comes; a failure ends the demo with the command's own message."""
    completed = subprocess.run([sys.executable, "-m", *arguments])
    if completed.returncode:
        sys.exit(
            f"error: `python -m {' '.join(arguments[:3])} …` failed with exit code {completed.returncode}; see above."
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/demo"))
    parser.add_argument("--num-pictures", type=int, default=NUM_PICTURES)
    arguments = parser.parse_args()
    demo = Demo(arguments.folder, arguments.num_pictures)
    demo.step("world", f"draw {arguments.num_pictures} captioned pictures", demo.make_world)
    demo.step("download", "serve them over HTTP, and download them with img2dataset", demo.download)
    demo.step("precompute", "stage 1: encode pictures and captions into latents", demo.precompute)
    demo.step("phase1", "stage 2, phase 1: train at 64 px", lambda: demo.train(1))
    demo.step("phase2", "stage 2, phase 2: train at 128 px", lambda: demo.train(2))
    demo.step("evaluate", "evaluate the checkpoints of both phases", demo.evaluate)
    demo.report()
    if arguments.num_pictures >= NUM_PICTURES:
        check_adherence(arguments.folder)


if __name__ == "__main__":
    main()
