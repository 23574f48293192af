"""Run both stages on a synthetic world of images, without a GPU (`make demo`).

    world → (HTTP) → tars → latents → phase 1 (64 px) → phase 2 (128 px) → evaluation → report

Most steps run the command that a user would type; log.txt in the demo's folder has these commands and their output.
After an interruption, run the demo again to continue with the first unfinished step. Once the demo has finished,
running it again starts over.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from examples.shapes.progress import Progress, Step
from examples.shapes.scenes import NUM_PROMPTS
from examples.shapes.serve import serve
from examples.shapes.world import NUM_PICTURES, metadata, plan_world, write_world
from shards.base.config import load_config
from shards.base.device import available_cores, has_nvidia_gpu
from train.config import TrainConfig
from train.run.reporting.json_lines import read_json_lines

CONFIGS = Path(__file__).parent / "configs"
SIDES = {"phase1": 64, "phase2": 128}
"""Side length of each phase's images in pixels."""
ROWS_PER_TAR = 500
WORLD_SEED = 0
MAX_THREADS = 4
"""Maximum number of threads for training, because the network is small."""
LAST_LINES = 15
"""Number of lines of a failed command's output to print."""


class Demo:
    """The demo's folder, its finished steps and their durations."""

    def __init__(self, folder: Path, num_pictures: int = NUM_PICTURES, seed: int = 0):
        """Open or create the demo's folder.

        Raises:
            SystemExit: the folder contains an unfinished demo with another seed or number of images.
        """
        self.folder = folder
        self.num_pictures, self.seed = num_pictures, seed
        self.state = folder / "state.json"
        self.log = folder / "log.txt"
        if (folder / "metrics.json").exists() and self.state.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.settings = settings = {"num_pictures": num_pictures, "seed": seed}
        found: dict[str, Any] = json.loads(self.state.read_text()) if self.state.exists() else {"settings": settings}
        if found["settings"] != settings:
            sys.exit(
                f"error: {folder} contains an unfinished demo with other settings ({found['settings']}). Choose a "
                f"different --folder, or delete that one."
            )
        self.seconds: dict[str, float] = found.get("seconds", {})
        self.finished: list[str] = found.get("finished", [])
        self.steps: tuple[Step, ...] = (
            Step("world", f"draw {num_pictures:,} captioned images", 7, "data", self.draw),
            Step("download", "download them over HTTP", 7, "data", self.download, lambda: self.share("tars/*.tar")),
            Step(
                "precompute",
                "stage 1: encode images and captions into latents",
                35,
                "data",
                self.precompute,
                lambda: self.share("latents/commits/64x64/*.json"),
            ),
            Step(
                "phase1",
                "stage 2, phase 1: train at 64 px",
                150,
                "training",
                lambda: self.train(1),
                lambda: self.share_of_phase(1),
            ),
            Step(
                "phase2",
                "stage 2, phase 2: train at 128 px",
                125,
                "training",
                lambda: self.train(2),
                lambda: self.share_of_phase(2),
            ),
            Step(
                "evaluate",
                "sample and judge images of both phases",
                40,
                "training",
                self.evaluate,
                self.share_of_sampling,
            ),
        )

    def run(self) -> None:
        """Run all steps that are not finished yet."""
        progress = Progress(self.steps, self.seconds, self.finished)
        for step in self.steps:
            if step.name in self.finished:
                print(f"{step.title}: finished earlier", flush=True)
                continue
            try:
                with progress.running(step):
                    step.work()
                self.finished.append(step.name)
            finally:
                state = {"settings": self.settings, "seconds": self.seconds, "finished": self.finished}
                self.state.write_text(json.dumps(state))

    @property
    def latents(self) -> str:
        """Path of the latents root."""
        return str(self.folder / "latents")

    def share(self, files: str) -> float:
        """Return the share of the tars for which a file exists that matches the pattern."""
        return len(list(self.folder.glob(files))) / -(-self.num_pictures // ROWS_PER_TAR)

    def share_of_phase(self, phase: int) -> float:
        """Return the share of a phase's steps that have been trained."""
        lines = read_json_lines(self.folder / f"phase{phase}" / "metrics.jsonl")
        config = load_config(TrainConfig, CONFIGS / f"phase{phase}.yaml", [], "demo")
        return lines[-1]["step"] / config.max_steps if lines else 0.0

    def share_of_sampling(self) -> float:
        """Return the share of the samples' pixels that have been drawn."""
        pictures = {phase: list(self.folder.glob(f"{phase}/evaluations/*/*/pictures/*/*.png")) for phase in SIDES}
        drawn = sum(len(pictures[phase]) * side**2 for phase, side in SIDES.items())
        return drawn / sum(NUM_PROMPTS.values()) / sum(side**2 for side in SIDES.values())

    def draw(self) -> None:
        """Draw the images."""
        write_world(self.folder / "web", self.num_pictures, WORLD_SEED)

    def download(self) -> None:
        """Download the images over HTTP into webdataset tars."""
        shutil.rmtree(self.folder / "tars", ignore_errors=True)
        with serve(self.folder / "web") as address:
            table = metadata(plan_world(self.num_pictures, WORLD_SEED), address)
            pq.write_table(table, self.folder / "metadata.parquet")
            self.call(
                *("precompute.download", "--config", "configs/download.yaml"),
                *("--input", str(self.folder / "metadata.parquet"), "--output", str(self.folder / "tars")),
                *("--requests.allow_private_hosts", "true", "--rows_per_shard", str(ROWS_PER_TAR)),
                *("--threads", "1"),  # more would store the images in the order of arrival
                no_proxy="*",  # the server is on this machine
            )

    def precompute(self) -> None:
        """Encode the tars into latents (stage 1)."""
        files = ("--config", str(CONFIGS / "precompute.yaml"), "--input", str(self.folder / "tars"))
        self.call("precompute", *files, "--output", self.latents, *worker_options(min(2, available_cores())))

    def train(self, phase: int) -> None:
        """Train one phase of stage 2, like `make train`."""
        start = ["--init_from", str(self.folder / "phase1")] if phase == 2 else []
        self.call(
            *("train", "--config", str(CONFIGS / f"phase{phase}.yaml"), "--data.root", self.latents),
            *("--run_dir", str(self.folder / f"phase{phase}"), "--seed", str(2 * self.seed + phase - 1), *start),
            OMP_NUM_THREADS=str(min(available_cores(), MAX_THREADS)),
        )

    def evaluate(self) -> None:
        """Sample the fixed prompts from both phases, compute metrics, and judge the images."""
        self.call("examples.shapes.evaluate", str(self.folder), *worker_options(1))

    def call(self, *arguments: str, **variables: str) -> None:
        """Run `python -m …` with these arguments and additional environment variables, and write its output to the log.

        Raises:
            SystemExit: the command failed.
        """
        with self.log.open("a+") as log:
            print(f"\n$ python -m {shlex.join(arguments)}", file=log, flush=True)
            start = log.tell()
            environment = os.environ | variables | {"NO_COLOR": "1"}
            command = [sys.executable, "-m", *arguments]
            with subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT) as process:
                try:
                    process.wait()
                except KeyboardInterrupt:  # the terminal has sent the command the same signal
                    process.wait()
                    raise
            if process.returncode:
                log.seek(start)
                lines = "\n".join(log.read().splitlines()[-LAST_LINES:])
                sys.exit(
                    f"{lines}\nerror: `python -m {' '.join(arguments[:3])} …` failed with exit code "
                    f"{process.returncode}; the end of its output is above, and all of it is in {self.log}. Run the "
                    f"demo again to continue with this step."
                )


def worker_options(num_cpus: int) -> tuple[str, ...]:
    """Return the options for Ray workers: one GPU each if this machine has any, and otherwise `num_cpus` cores."""
    num_gpus = "1" if has_nvidia_gpu() else "0"
    return "--workers.num_gpus", num_gpus, "--workers.num_cpus", str(num_cpus)


def main() -> None:
    """Run the demo, write its report, and check its results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/demo"), help="default: runs/demo")
    parser.add_argument("--num-pictures", type=int, default=NUM_PICTURES, help=f"default: {NUM_PICTURES:,}")
    parser.add_argument("--seed", type=int, default=0, help="seed of the training; default: 0")
    arguments = parser.parse_args()
    try:
        plan_world(arguments.num_pictures, WORLD_SEED)
    except ValueError as error:
        parser.error(str(error))
    demo = Demo(arguments.folder, arguments.num_pictures, arguments.seed)
    try:
        demo.run()
    except KeyboardInterrupt:
        sys.exit("\nInterrupted. Run the demo again to continue with this step.")
    # imported here, because matplotlib takes seconds to import
    from examples.shapes.adherence import check_adherence
    from examples.shapes.report import write_report

    write_report(demo.folder, demo.seconds)
    if arguments.num_pictures >= NUM_PICTURES:
        check_adherence(arguments.folder)


if __name__ == "__main__":
    main()
