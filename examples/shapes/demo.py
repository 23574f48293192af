"""Run both stages on a synthetic world of images, without a GPU (`make demo`).

    world → (HTTP) → tars → latents → phase 1 (64 px) → phase 2 (128 px) → evaluation → report

Most steps run the command that a user would type. After an interruption, run the demo again to continue with the first
unfinished step. Once the demo has finished, running it again starts over.
"""

import argparse
import json
import os
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
MAX_PROCESSES = 8
"""Maximum number of training processes, so that each process gets at least four images per batch in phase 2."""
PHASE2_BATCH = 32
"""Phase 2's global batch size, which the training processes share evenly."""
STEP_RATIO, LATER_SECONDS_RATIO = 1.55, 0.53
"""Durations of phase 2, and of everything after it, relative to phase 1. They were measured on CPUs, and the demo's
estimate uses them."""
EXPECTED = (
    "On 2 cores, the demo takes 13 to 23 minutes if they have AVX-512 or AMX, and 28 if they have only AVX2. It "
    "estimates its time on this machine once phase 1 has trained ten steps."
)
ESTIMATE_AFTER = 10
"""Number of steps in phase 1 after which the demo estimates its total duration."""


class Demo:
    """The demo's folder, its finished steps and their durations."""

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

    def run(self) -> None:
        """Run all steps that are not finished yet."""
        steps: dict[str, tuple[str, Callable[[], object]]] = {
            "world": (
                f"Draw {self.num_pictures:,} captioned images",
                lambda: write_world(self.folder / "web", self.num_pictures, SEED),
            ),
            "download": ("Serve the images over HTTP and download them with img2dataset", self.download),
            "precompute": ("Stage 1: encode images and captions into latents", self.precompute),
            "phase1": ("Stage 2, phase 1: train at 64 px", lambda: self.train(1)),
            "phase2": ("Stage 2, phase 2: train at 128 px", lambda: self.train(2)),
            "evaluate": ("Evaluate the checkpoints of both phases", self.evaluate),
        }
        for number, (name, (title, work)) in enumerate(steps.items(), start=1):
            self.step(f"[{number}/{len(steps)}]", name, title, work)

    def step(self, number: str, name: str, title: str, work: Callable[[], object]) -> None:
        """Run a step, unless it was finished before an interruption, and print its duration."""
        if name in self.done:
            print(f"{number} {title}: finished earlier", flush=True)
            return
        print(f"\n{number} {title}", flush=True)
        started = time.monotonic()
        try:
            work()
            self.done.append(name)
        finally:  # time spent before an interruption counts as well
            self.seconds[name] = round(self.seconds.get(name, 0.0) + time.monotonic() - started, 1)
            self.timings.write_text(json.dumps({"seconds": self.seconds, "done": self.done}))
        print(f"{number} Done in {self.seconds[name]:.0f} s.", flush=True)

    def download(self) -> None:
        """Download the images over HTTP into webdataset tars."""
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
        """Encode the tars into latents (stage 1)."""
        files = ("--config", str(CONFIGS / "precompute.yaml"), "--input", str(self.folder / "tars"))
        call("precompute", *files, "--output", self.latents, "--workers.num_cpus", str(min(2, available_cores())))

    def train(self, phase: int) -> None:
        """Train one phase of stage 2, launched like `make train`, and export it."""
        run_dir = self.folder / f"phase{phase}"
        start = ["--init_from", str(self.folder / "phase1")] if phase == 2 else []
        config = CONFIGS / f"phase{phase}.yaml"
        cores = available_cores()
        processes = str(training_processes(cores))  # the loss curve does not depend on this number
        threads = str(cores // int(processes))
        launch = ["train.launch", "--num_machines", "1", "--num_processes", processes]
        launch += ["--multi_gpu", "--main_process_port", "0"] if processes != "1" else []
        launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "--quiet"]
        arguments = ["--config", str(config), "--run_dir", str(run_dir), "--data.root", self.latents, *start]
        with self.estimate(run_dir / "metrics.jsonl") if phase == 1 else nullcontext():
            call(*launch, "-m", "train", *arguments, "--num_processes", processes, OMP_NUM_THREADS=threads)
        call("train", "export", str(run_dir))

    @contextmanager
    def estimate(self, metrics: Path) -> Iterator[None]:
        """Print an estimate of the demo's total duration once phase 1 has logged its first steps."""
        ended = threading.Event()
        earlier = sum(self.seconds.values())
        started = time.monotonic()

        def watch() -> None:
            while not ended.wait(0.5):
                if metrics.exists() and (lines := metrics.read_text().splitlines()):
                    line = json.loads(lines[0])
                    if line["step"] > ESTIMATE_AFTER:
                        return  # phase 1 was resumed, and the estimate was printed before the interruption
                    spent = earlier + time.monotonic() - started
                    left = seconds_left(line["images_per_second"])
                    print(
                        f"The demo will take about {(spent + left) / 60:.0f} min in total ({spent / 60:.0f} min so "
                        f"far). Phase 1 trains at {line['images_per_second']:.0f} images/s.",
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
        """Path of the latents root."""
        return str(self.folder / "latents")

    def evaluate(self) -> None:
        """Sample the fixed prompts from the checkpoints of both phases, compute metrics, and judge the images."""
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


def training_processes(cores: int) -> int:
    """Return the largest number of processes for `cores` CPU cores that divides phase 2's batch evenly."""
    return max(n for n in range(1, min(cores, MAX_PROCESSES) + 1) if PHASE2_BATCH % n == 0)


def seconds_left(images_per_second: float) -> float:
    """Estimate the seconds from phase 1's first logged step to the end of the demo, from the speed at that step."""
    config = load_config(TrainConfig, CONFIGS / "phase1.yaml", [], "demo")
    phase_1 = (config.max_steps - ESTIMATE_AFTER) * config.global_batch_size / images_per_second
    return phase_1 * (1 + STEP_RATIO + LATER_SECONDS_RATIO)


def call(*arguments: str, **variables: str) -> None:
    """Run `python -m …` with these arguments and additional environment variables. Exit if the command fails."""
    completed = subprocess.run([sys.executable, "-m", *arguments], env=os.environ | variables)
    if completed.returncode:
        sys.exit(
            f"error: `python -m {' '.join(arguments[:3])} …` failed with exit code {completed.returncode}. See its "
            f"error message above. Run the demo again to continue with this step."
        )


def main() -> None:
    """Run the demo, write its report, and check its results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/demo"), help="default: runs/demo")
    parser.add_argument("--num-pictures", type=int, default=NUM_PICTURES, help=f"default: {NUM_PICTURES:,}")
    arguments = parser.parse_args()
    try:
        plan_world(arguments.num_pictures, SEED)
    except ValueError as error:
        parser.error(str(error))
    demo = Demo(arguments.folder, arguments.num_pictures)
    print(EXPECTED, flush=True)
    demo.run()
    write_report(demo.folder, demo.seconds)
    if arguments.num_pictures >= NUM_PICTURES:
        check_adherence(arguments.folder)


if __name__ == "__main__":
    main()
