"""Training runs for tests: configs, and the command in a separate process."""

import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import yaml

from shards.base.store import Store
from tests import ranks
from tests.ranks import environment as environment
from train.__main__ import run as train
from train.run.checkpoints.checkpoint import Checkpoint, list_checkpoints, step_folder, verify_checkpoint
from train.run.checkpoints.local_copy import download, stored_checkpoints
from train.run.lease.folder import FolderBackend
from train.run.lease.lease import Lease
from train.run.reporting.json_lines import read_json_lines

UNET = Path(__file__).with_name("tiny_unet.json")
TRANSFORMER = Path(__file__).with_name("tiny_transformer.json")
"""A network whose runs take about half as long as those of `UNET`."""
ONE_LEVEL_UNET = Path(__file__).parents[1] / "bench" / "gpu_check" / "rehearsal_unet.json"
"""`UNET` with only one level and one transformer, because compiling takes a second per block."""
PYTHON = (sys.executable,)


def train_fields(latents: Path, run_dir: Path | str, network: Path = TRANSFORMER, /, **changes: Any) -> dict[str, Any]:
    """Return the config of a small run: global batch 8 of the 64x64 bucket, 6 steps, a line of metrics per step."""
    fields: dict[str, Any] = {
        "run_dir": str(run_dir),
        "max_steps": 6,
        "global_batch_size": 8,
        "microbatch_size": 4,
        "backbone": {"config": str(network)},
        "data": {"streams": [{"root": str(latents), "bucket": "64x64"}], "num_workers": 0, "num_canonical_nodes": 4},
        "schedule": {"warmup_steps": 3},
        "ema": {"decay": 0.9, "start_step": min(2, changes.get("max_steps", 6))},
        "checkpoint": {"every": 2, "keep": 2},
        "log": {"every": 1, "samples": True, "tracker": "none"},
        "precision": "float32",
    }
    for key, value in changes.items():
        fields[key] = {**fields[key], **value} if isinstance(fields.get(key), dict) else value
    return fields


def write_config(folder: Path, fields: dict[str, Any]) -> Path:
    """Write the fields to a YAML file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{Path(fields['run_dir']).name}.yaml"
    path.write_text(yaml.safe_dump(fields))
    return path


def train_run(latents: Path, run_dir: Path, network: Path = TRANSFORMER, /, **changes: Any) -> Path:
    """Train a run with `train_fields` in this process, and return its folder."""
    train(["--config", str(write_config(run_dir.parent, train_fields(latents, run_dir, network, **changes)))])
    return run_dir


def run_module(
    module: str,
    *arguments: str,
    num_processes: int = 1,
    launcher: tuple[str, ...] = (),
    variables: Mapping[str, str] = {},
    seconds: float = 600,
) -> subprocess.CompletedProcess[str]:
    """Run `python -m MODULE …` in separate processes, which have imported everything unless a launcher starts them.

    Args:
        num_processes: number of trainer processes, as a launcher would start them.
        launcher: arguments before `-m`.
        variables: environment variables.
        seconds: time limit, after which the command is killed.
    """
    command = [*(launcher or PYTHON), "-m", module, *arguments]
    if launcher:
        return subprocess.run(command, capture_output=True, text=True, env=environment(**variables), timeout=seconds)
    program = f"{module if '.' in module else f'{module}.__main__'}:run"
    told = ranks.run_command(program, list(arguments), num_processes, seconds, variables)
    return subprocess.CompletedProcess(command, *told)


def launcher(num_processes: int) -> tuple[str, ...]:
    """Return the arguments that `make train NPROC=…` puts before `-m train`: the launcher, with gloo ranks on CPUs."""
    flags = ["--num_machines", "1", "--num_processes", str(num_processes), "--mixed_precision", "no"]
    ports = ["--main_process_port", "0"] if num_processes > 1 else []
    multi = ["--multi_gpu"] if num_processes > 1 else []
    return (*PYTHON, "-m", "train.launch", *flags, *multi, *ports, "--dynamo_backend", "no", "--quiet")


def curve(run_dir: Path) -> tuple[list[float], list[list[str]]]:
    """Return losses and sample keys per step."""
    return column(run_dir, "loss"), [row["keys"] for row in read_json_lines(run_dir / "samples.jsonl")]


def column(run_dir: Path, field: str) -> list[Any]:
    """Return one field of every line of metrics.jsonl."""
    return [row[field] for row in read_json_lines(run_dir / "metrics.jsonl")]


def compare(run: Path, undisturbed: Path) -> dict[str, Any]:
    """Compare a finished run with the undisturbed one, and return figures of what is equal."""
    found, expected = curve(run), curve(undisturbed)
    assert found == expected
    last = [list_checkpoints(folder)[-1] for folder in (run, undisturbed)]
    assert last[0].name == last[1].name
    assert verify_checkpoint(last[0]).content["files"] == verify_checkpoint(last[1]).content["files"]
    difference = max(abs(a - b) for a, b in zip(found[0], expected[0], strict=True))
    return {"steps": len(found[0]), "largest_difference": difference, "sample_lines_equal": len(found[1])}


def last_step(run: Path) -> int:
    """Return the step of the last complete line of metrics.jsonl."""
    rows = read_json_lines(run / "metrics.jsonl")
    return int(rows[-1]["step"]) if rows else 0


def rank_processes(pid: int) -> list[psutil.Process]:
    """Return the trainer's processes below a launcher."""
    try:
        return [child for child in psutil.Process(pid).children() if "train" in child.cmdline()]
    except psutil.NoSuchProcess:
        return []


def wait_until(
    true: Callable[[], object],
    seconds: float = 240,
    process: BaseProcess | subprocess.Popen[Any] | None = None,
    log: Path | None = None,
) -> None:
    """Poll until the condition holds. Fail with the end of `log` after `seconds`, or when `process` ends."""
    end = time.monotonic() + seconds
    while not true():
        code = process.poll() if isinstance(process, subprocess.Popen) else process and process.exitcode
        assert code is None and time.monotonic() < end, log.read_text()[-3000:] if log else "it did not happen in time"
        time.sleep(0.02)


def acquire(run_dir: Path, ttl: float = 1.0) -> Lease:
    """Acquire a run folder. A lease that this process acquired before counts as dead."""
    return Lease.acquire(FolderBackend(run_dir), ttl)


def fetch(store: Store, run: Path, name: str) -> Checkpoint:
    """Download a checkpoint to the folder `run`, or raise an error if it is not complete."""
    return download(store, stored_checkpoints(store)[name], step_folder(run, int(name.removeprefix("step-"))))
