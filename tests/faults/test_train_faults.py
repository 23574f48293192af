"""Training killed at random moments, at every stage of writing a checkpoint, and rank by rank under the launcher.

After any disturbance, the losses, the log of samples and the last checkpoint are bit-identical to those of the
undisturbed run. `make test-faults` runs the long form and prints its figures.
"""

import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import ranks
from tests.fixtures import Record
from tests.runs import compare, environment, last_step, launcher, rank_processes, train_fields, write_config
from train.__main__ import run as command
from train.run.checkpoints import writer as checkpoint
from train.run.lease import folder as lease_folder

STAGES = [
    # function, which of its calls, and whether the kill comes before, halfway through or after the call
    ("write_tensors", 1, "before"),  # the folder is there, and nothing in it but the network's config
    ("write_tensors", 1, "half"),
    ("write_tensors", 2, "before"),
    ("write_tensors", 2, "half"),  # the moving average
    ("write_tensors", 3, "before"),
    ("write_tensors", 3, "half"),  # the optimizer
    ("sha256_file", 1, "before"),
    ("sha256_file", 3, "after"),
    ("write_file", 1, "before"),
    ("write_file", 1, "half"),
    ("write_file", 1, "after"),
    ("fsync_tree", 1, "after"),
    ("fsync_folder", 1, "before"),  # renamed
    ("fsync_folder", 1, "after"),
    ("rmtree", 1, "before"),  # of a checkpoint that is not kept
    ("rmtree", 1, "half"),
    ("rmtree", 1, "after"),
]
SHORT_STAGES = ["write_tensors-2-half", "rmtree-1-half"]


def die() -> None:
    """Kill the process like a power cut."""
    os.kill(os.getpid(), signal.SIGKILL)


def train_until_stage(arguments: list[str]) -> None:
    """Run a trainer that is killed at a stage (`function-call-moment`) of its second checkpoint."""
    name, call, moment = arguments[0].split("-")
    written, calls = Counter[str](), Counter[str]()
    write = checkpoint.CheckpointWriter._write

    def counted_write(self: Any, *arguments: Any) -> None:
        written["checkpoints"] += 1
        write(self, *arguments)

    def deadly(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **keywords: Any) -> Any:
            # the writer removes files that it did not rename, if any
            if written["checkpoints"] < 2 or not Path(args[0] if name == "rmtree" else "/").exists():
                return function(*args, **keywords)
            calls[name] += 1
            if calls[name] == int(call) and moment == "before":
                die()
            if calls[name] == int(call) and moment == "half":
                halfway(name, args, lambda: function(*args, **keywords))
                die()
            result = function(*args, **keywords)
            if calls[name] == int(call):
                die()
            return result

        return called

    checkpoint.CheckpointWriter._write = counted_write  # type: ignore[assignment, method-assign]
    owners = {"rmtree": checkpoint.shutil, "fsync_folder": lease_folder}
    owner: Any = owners.get(name, checkpoint)
    setattr(owner, name, deadly(getattr(owner, name)))
    command(arguments[1:])


def halfway(name: str, arguments: tuple[Any, ...], finish: Callable[[], Any]) -> None:
    """Leave the result of a kill in the middle of the call: a truncated file or a half-removed folder."""
    if name == "rmtree":
        next(path for path in sorted(Path(arguments[0]).rglob("*")) if path.is_file()).unlink()
        return
    finish()
    path = Path(arguments[0])
    os.truncate(path, path.stat().st_size // 2)


def reference(latents: Path, folder: Path, max_steps: int, num_processes: int = 1) -> Path:
    """Folder of the undisturbed run."""
    fields = run_fields(latents, folder / "undisturbed", max_steps)
    ranks.run(folder / "undisturbed.log", ["--config", str(write_config(folder, fields))], num_processes)
    return folder / "undisturbed"


def run_fields(latents: Path, run_dir: Path, max_steps: int, **changes: Any) -> dict[str, Any]:
    """Return the config of a run with a checkpoint after every second step, which takes about half of the time."""
    changes = {"checkpoint": {"every": 2, "keep": 2}, "collective_timeout": 120.0} | changes
    return train_fields(latents, run_dir, max_steps=max_steps, **changes)


def kill_at_random(latents: Path, folder: Path, name: str, undisturbed: Path, rng: random.Random) -> dict[str, Any]:
    """Start a run repeatedly, and kill it 0 to 8 steps and a random moment later, until it is done."""
    changes = {"data": {"num_workers": rng.choice([0, 2])}}
    kept = {"every": 2, "keep": 2, "asynchronous": rng.random() < 0.5}
    fields = run_fields(latents, folder / name, last_step(undisturbed), checkpoint=kept, **changes)
    arguments = ["--config", str(write_config(folder, fields))]
    kills = 0
    while True:
        (process,) = ranks.start(folder / f"{name}.log", arguments)
        until = last_step(folder / name) + rng.randint(0, 8)
        # a resumed run first drops the lines after its checkpoint; a run killed before it wrote a line counts too
        deadline = time.monotonic() + 120
        while process.is_alive() and last_step(folder / name) < until and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.2))
        if not process.is_alive():
            process.join()
            assert process.exitcode == 0, (folder / f"{name}.log").read_text()[-3000:]
            break
        assert process.pid is not None
        # the process alone or, like a scheduler, with its loader and all other processes
        kill = os.kill if rng.random() < 0.5 else os.killpg
        try:
            kill(process.pid, signal.SIGKILL)
        except ProcessLookupError:  # it has just finished, or has not made its process group yet
            process.kill()
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL), (folder / f"{name}.log").read_text()[-3000:]
        kills += process.exitcode == -signal.SIGKILL
        if process.exitcode == 0:
            break
    log = (folder / f"{name}.log").read_text()
    resumes, damaged = log.count("resuming "), log.count("is damaged and will be skipped")
    return compare(folder / name, undisturbed) | {"kills": kills, "resumes": resumes, "damaged": damaged}


def kill_at_stages(
    latents: Path, folder: Path, stages: list[str], asynchronous: bool, undisturbed: Path
) -> dict[str, Any]:
    """Kill one run at one stage after another, and resume it each time."""
    name = "asynchronous" if asynchronous else "synchronous"
    kept = {"every": 2, "keep": 2, "asynchronous": asynchronous}
    fields = run_fields(latents, folder / name, last_step(undisturbed), checkpoint=kept)
    arguments = ["--config", str(write_config(folder, fields))]
    for stage in stages:
        program = "tests.faults.test_train_faults:train_until_stage"
        codes = ranks.wait(ranks.start(folder / f"{name}.log", [stage, *arguments], program=program))
        assert codes == [-signal.SIGKILL], f"{stage}: {codes}\n{(folder / f'{name}.log').read_text()[-3000:]}"
    ranks.run(folder / f"{name}.log", arguments)
    log = (folder / f"{name}.log").read_text()
    resumes, damaged = log.count("resuming "), log.count("is damaged and will be skipped")
    return compare(folder / name, undisturbed) | {"kills": len(stages), "resumes": resumes, "damaged": damaged}


def total(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Add up the counts, and take the largest difference."""
    counts = {key: sum(part[key] for part in parts) for key in parts[0] if key != "largest_difference"}
    return {"runs": len(parts)} | counts | {"largest_difference": max(part["largest_difference"] for part in parts)}


@pytest.mark.slow
def test_killed_fifty_times_at_random_moments(
    latents: Path, tmp_path: Path, seed: int, record_property: Record
) -> None:
    rng = random.Random(seed)
    parts: list[dict[str, Any]] = []
    undisturbed = reference(latents, tmp_path, max_steps=40)
    while sum(part["kills"] for part in parts) < 50 and len(parts) < 50:
        parts.append(kill_at_random(latents, tmp_path, f"run-{len(parts)}", undisturbed, rng))
    figures = total(parts)
    assert figures["kills"] >= 50
    record_property("killed at random moments", figures)


def test_killed_at_some_stages_of_writing_a_checkpoint(latents: Path, tmp_path: Path) -> None:
    """Write the checkpoints in the background; `make test-faults` tests all stages, also without the background."""
    undisturbed = reference(latents, tmp_path, max_steps=6 + 4 * len(SHORT_STAGES))
    assert kill_at_stages(latents, tmp_path, SHORT_STAGES, True, undisturbed)["resumes"] == len(SHORT_STAGES)


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_killed_at_every_stage_of_writing_a_checkpoint(
    asynchronous: bool, latents: Path, tmp_path: Path, record_property: Record
) -> None:
    stages = [f"{name}-{call}-{moment}" for name, call, moment in STAGES]
    undisturbed = reference(latents, tmp_path, max_steps=6 + 4 * len(stages))
    figures = kill_at_stages(latents, tmp_path, stages, asynchronous, undisturbed)
    assert figures["resumes"] == len(stages)
    record_property("killed at stages of writing a checkpoint", figures)


@pytest.mark.slow
def test_the_launcher_brings_back_a_job_whose_ranks_are_killed(
    latents: Path, tmp_path: Path, seed: int, record_property: Record
) -> None:
    """Kill a random one of two ranks at a random step, twelve times, under one launcher with `--max_restarts`."""
    rng, kills, ranks_killed = random.Random(seed), 0, Counter[str]()
    undisturbed = reference(latents, tmp_path, max_steps=100, num_processes=2)
    config = write_config(tmp_path, run_fields(latents, tmp_path / "run", max_steps=100))
    launch = [*launcher(2), "--max_restarts", "20", "-m", "train", "--config", str(config)]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(launch, env=environment(), stdout=log, stderr=subprocess.STDOUT)
    while kills < 12 and process.poll() is None:
        resumed, until = len((tmp_path / "log").read_text().split("resuming ")), last_step(tmp_path / "run")
        until += rng.randint(2, 7)
        while process.poll() is None and (last_step(tmp_path / "run") < until or resumed <= kills):
            resumed = len((tmp_path / "log").read_text().split("resuming "))
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.1))
        victims = rank_processes(process.pid)
        if len(victims) == 2:
            victim = rng.choice(victims)
            ranks_killed[victim.environ()["RANK"]] += 1
            victim.kill()
            kills += 1
    assert process.wait(300) == 0, (tmp_path / "log").read_text()[-5000:]
    figures = compare(tmp_path / "run", undisturbed) | {"kills": kills, "killed_by_rank": dict(ranks_killed)}
    assert kills >= 10
    record_property(
        "ranks killed under a launcher", figures | {"resumes": (tmp_path / "log").read_text().count("resuming ")}
    )


@pytest.mark.slow
def test_two_launchers_bring_back_a_job_of_two_machines(latents: Path, tmp_path: Path, record_property: Record) -> None:
    """Kill a rank of the first machine, then a rank of the second; both machines restart and rejoin."""
    if not ranks.nodes_can_be_simulated():
        pytest.skip("this process may not make a /dev/shm of its own for each machine")
    undisturbed = reference(latents, tmp_path, max_steps=40, num_processes=2)
    config = write_config(tmp_path, run_fields(latents, tmp_path / "run", max_steps=40))
    flags = ["--num_machines", "2", "--num_processes", "2", "--multi_gpu", "--main_process_ip", "127.0.0.1"]
    flags += ["--main_process_port", str(ranks.free_port()), "--max_restarts", "5", "--mixed_precision", "no"]
    machines = []
    for machine in range(2):
        launch = [*launcher(1)[:3], *flags, "--dynamo_backend", "no", "--machine_rank", str(machine)]
        own = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh"]
        (tmp_path / f"machine-{machine}").mkdir()
        with (tmp_path / f"log-{machine}").open("w") as log:
            command = [*own, *launch, "-m", "train", "--config", str(config)]
            variables = environment(TMPDIR=str(tmp_path / f"machine-{machine}"))
            machines.append(subprocess.Popen(command, env=variables, stdout=log, stderr=subprocess.STDOUT))
    for machine, until in enumerate((6, 20)):
        while last_step(tmp_path / "run") < until and machines[0].poll() is None:
            time.sleep(0.01)
        (victim,) = rank_processes(machines[machine].pid)
        victim.kill()
    logs = [tmp_path / f"log-{machine}" for machine in range(2)]
    codes = [process.wait(600) for process in machines]
    assert codes == [0, 0], "\n".join(log.read_text()[-3000:] for log in logs)
    record_property("ranks killed on two machines", compare(tmp_path / "run", undisturbed) | {"kills": 2})
