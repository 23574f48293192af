"""The recipes of deploy/slurm under Debian's Slurm, on two nodes of one machine: `make test-slurm`.

Whatever Slurm does to a run, its curve and last checkpoint are bit-identical to those of an undisturbed run.
"""

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shards.open import open_store
from shards.root.committed import load_receipts
from shards.tools.verify import verify_root
from tests import ranks
from tests.deploy.machines import missing
from tests.deploy.slurm import PROGRAMS, Slurm
from tests.faults.world import make_world
from tests.roots import load_tars, precompute_arguments, tree
from tests.runs import PYTHON, UNET, compare, environment, last_step, train_fields, wait_until, write_config

pytestmark = [pytest.mark.slow, pytest.mark.slurm]
REPOSITORY = Path(__file__).parents[2]
TRAIN, PRECOMPUTE = "deploy/slurm/train.sbatch", "deploy/slurm/precompute.sbatch"
SMALL = ["--nodes", "2", "--ntasks-per-node", "1", "--cpus-per-task", "1"]
"""Options that differ from the scripts, because sixteen ranks would not fit this machine."""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if missing(*PROGRAMS):
        pytest.fail(f"These tests need {', '.join(missing(*PROGRAMS))}: make test-slurm, as root")
    variables = environment(PYTHONPATH=str(REPOSITORY), PYTHON=PYTHON[0], GLOO_SOCKET_IFNAME="eth0")
    with Slurm(tmp_path_factory.mktemp("slurm"), REPOSITORY, variables) as cluster:
        yield cluster


class Training:
    """A job of deploy/slurm/train.sbatch on two nodes with one rank each, and the disturbances it is exposed to."""

    def __init__(self, slurm: Slurm, latents: Path, folder: Path, max_steps: int, every: int):
        self.slurm, self.folder, self.run = slurm, folder, folder / "run"
        changes = {"checkpoint": {"every": every, "keep": 2}, "collective_timeout": 60.0, "takeover_after": 5.0}
        self.config = write_config(folder, train_fields(latents, self.run, UNET, max_steps=max_steps, **changes))
        undisturbed = train_fields(latents, folder / "undisturbed", UNET, max_steps=max_steps, **changes)
        self.undisturbed = write_config(folder, undisturbed)
        self.log = folder / "log"
        self.job = slurm.submit(*SMALL, "--output", str(self.log), TRAIN, "--config", str(self.config))
        self.events: list[str] = []
        self.lost = 0
        """Steps that were done and lost."""

    def reach(self, step: int) -> None:
        """Wait until this step is done."""
        wait_until(lambda: last_step(self.run) >= step, 300)

    def requeue(self) -> None:
        """Requeue the job like an administrator or a preemption: SIGTERM, then SIGKILL 30 s later."""
        self.slurm.login.run("scontrol", "requeue", str(self.job))
        self._again()

    def usr1(self) -> None:
        """Send SIGUSR1, like `--signal` before the time limit."""
        self.slurm.login.run("scancel", "--signal", "USR1", str(self.job))
        self._again()

    def power_cut(self) -> None:
        """Cut the second node's power, and start it again."""
        node = self.slurm.machines["node2"]
        node.power_cut()
        wait_until(lambda: self.slurm.state(self.job)["JobState"] != "RUNNING", 120)
        node.start()
        self.slurm.slurmd(node.name)
        self._again()

    def slurmd(self) -> None:
        """Kill and restart slurmd; the step's processes are not its children."""
        node = self.slurm.machines["node2"]
        node.kill("slurmd")
        self.slurm.slurmd(node.name)

    def rank(self) -> None:
        """Kill a rank; the script starts a new step in the same allocation."""
        self.slurm.machines["node2"].kill("python")

    def _again(self) -> None:
        self.slurm.start_now(self.job)

    def disturb(self, event: str) -> None:
        """Apply a disturbance, and count the steps that it cost."""
        before = self.log.read_text().count("resuming ")
        self.events.append(event)
        getattr(self, event)()
        if event == "slurmd":
            return
        stood = last_step(self.run)
        wait_until(lambda: self.log.read_text().count("resuming ") > before, 120)
        self.lost += stood - int(re.findall(r"resuming \S+ after step (\d+)", self.log.read_text())[-1])

    def finish(self) -> dict[str, Any]:
        """Wait for the job to end, and compare it with the undisturbed run."""
        state = self.slurm.finish(self.job)
        assert (state["JobState"], state["ExitCode"]) == ("COMPLETED", "0:0"), self.log.read_text()[-5000:]
        ranks.run(self.folder / "undisturbed.log", ["--config", str(self.undisturbed)], 2)
        return compare(self.run, self.folder / "undisturbed") | {"restarts": int(state["Restarts"])}


def test_variables_are_those_that_the_launcher_reads(slurm: Slurm) -> None:
    """Check the real Slurm's names and counts, and that the second node resolves the master."""
    code = (
        "import json, os, socket; from train.slurm import slurm_variables; found = slurm_variables(os.environ); "
        "print(json.dumps([socket.gethostname(), socket.gethostbyname(found['MASTER_ADDR']), found]))"
    )
    said = slurm.login.run("srun", "--nodes", "2", "--ntasks", "3", PYTHON[0], "-c", code).stdout
    tasks = sorted((json.loads(line) for line in said.splitlines()), key=lambda task: int(task[2]["RANK"]))
    assert [task[2]["RANK"] for task in tasks] == ["0", "1", "2"]
    assert [(task[0], task[2]["LOCAL_RANK"], task[2]["LOCAL_WORLD_SIZE"]) for task in tasks] == [
        ("node1", "0", "2"),
        ("node1", "1", "2"),
        ("node2", "0", "1"),
    ]
    assert {task[1] for task in tasks} == {"10.213.77.2"}
    assert {(task[2]["MASTER_ADDR"], task[2]["WORLD_SIZE"], task[2]["MASTER_PORT"]) for task in tasks} == {
        ("node1", "3", tasks[0][2]["MASTER_PORT"])
    }


def test_tasks_without_the_launcher_are_refused(slurm: Slurm, latents: Path, tmp_path: Path) -> None:
    """With plain `srun -n 2 python -m train …`, each task would train alone in the same run folder."""
    run = tmp_path / "run"
    config = write_config(tmp_path, train_fields(latents, run))
    words = ["--nodes", "2", "--ntasks", "2", "--label", "sh", "-c"]
    trainer = f"{PYTHON[0]} -m train --config {config}; echo left with $?"
    found = slurm.login.run("srun", *words, trainer)
    assert sorted(found.stdout.split("\n")) == ["", "0: left with 2", "1: left with 2"], found.stderr
    for task in range(2):
        lines = [line.removeprefix(f"{task}: ") for line in found.stderr.splitlines() if line.startswith(f"{task}: ")]
        said = " ".join(" ".join(lines).split())
        assert said.count("error:") == 1 and "srun started 2 tasks, but WORLD_SIZE is not set" in said, found.stderr
        assert "(`srun python -m train.launch --slurm -m train --config …`)" in said
    assert not run.exists()


def test_a_wrong_request_is_told_once_and_not_queued_again(slurm: Slurm, tmp_path: Path) -> None:
    job = slurm.submit(*SMALL, "--output", str(tmp_path / "log"), TRAIN, "--config", "absent.yaml")
    state = slurm.finish(job)
    assert (state["JobState"], state["ExitCode"], state["Restarts"]) == ("FAILED", "2:0", "0")
    assert (tmp_path / "log").read_text().count("error:") == 1


def test_one_number_of_make_is_two_machines(slurm: Slurm, latents: Path, tmp_path: Path) -> None:
    """`make train NODES=2` in an allocation gives the curve of two ranks on one machine."""
    run, log = tmp_path / "run", tmp_path / "log"
    config = write_config(tmp_path, train_fields(latents, run))
    typed = f"make train PHASE=1 NODES=2 NPROC=1 CONFIG={config}"
    state = slurm.finish(slurm.submit(*SMALL, "--output", str(log), "--wrap", typed))
    assert (state["JobState"], state["ExitCode"]) == ("COMPLETED", "0:0"), log.read_text()
    here = write_config(tmp_path, train_fields(latents, tmp_path / "here"))
    ranks.run(tmp_path / "here.log", ["--config", str(here)], 2)
    compare(run, tmp_path / "here")


def test_whatever_slurm_does_the_curve_is_the_undisturbed_one(slurm: Slurm, latents: Path, tmp_path: Path) -> None:
    """Try scontrol requeue, SIGUSR1, a killed slurmd, a killed rank and a power cut."""
    training = Training(slurm, latents, tmp_path, max_steps=700, every=20)
    for number, event in enumerate(("requeue", "usr1", "slurmd", "rank", "power_cut")):
        training.reach(100 * (number + 1))
        training.disturb(event)
    figures = training.finish()
    assert figures["restarts"] == 3, figures
    print(json.dumps(figures))


def test_goodput_at_one_preemption_in_ten_minutes(slurm: Slurm, latents: Path, tmp_path: Path) -> None:
    """A step stands for six seconds, as with SD2 at 512 px on 8 A100s: a preemption per 100 steps, a checkpoint per
    10."""
    rng, preemptions = random.Random(0), ["requeue", "usr1", "power_cut"] * 2
    rng.shuffle(preemptions)
    training = Training(slurm, latents, tmp_path, max_steps=100 * len(preemptions), every=10)
    for number, event in enumerate(preemptions):
        training.reach(100 * number + rng.randint(10, 90))
        training.disturb(event)
    figures = training.finish() | {"preemptions": training.events, "lost": training.lost}
    goodput = figures["steps"] / (figures["steps"] + training.lost)
    print(json.dumps(figures | {"goodput": round(goodput, 4)}))
    assert figures["restarts"] == len(preemptions) and goodput >= 0.97


def test_stage_1_is_a_ray_cluster_of_the_jobs_nodes(slurm: Slurm, models: Path, tmp_path: Path) -> None:
    """A job that is stopped midway is requeued, and the root is that of an undisturbed job."""
    tars = 24  # on a busy machine, one node begins seconds after the other
    world = make_world(tmp_path, models, num_shards=tars, num_samples=100)
    root = tmp_path / "root"

    def hosts() -> set[str]:
        return {receipt.made_by.host for receipt in load_receipts(open_store(root)) if receipt.made_by}

    words = precompute_arguments(models, world.tars, root, "--workers.decode_threads", "1", "--workers.batch_size", "8")
    job = slurm.submit(*SMALL, "--output", str(tmp_path / "log"), PRECOMPUTE, *words)
    wait_until(lambda: root.is_dir() and hosts() == {"node1", "node2"}, 300)
    slurm.login.run("scancel", "--signal", "USR1", str(job))
    slurm.start_now(job)
    state = slurm.finish(job)
    assert (state["JobState"], state["ExitCode"], state["Restarts"]) == ("COMPLETED", "0:0", "1")
    log = (tmp_path / "log").read_text()
    assert "Stopped by a signal" in log and f"Tars: {tars} encoded" not in log
    assert parts_of(root) == parts_of(world.reference) and list(verify_root(open_store(root))) == []


def parts_of(root: Path) -> dict[str, bytes]:
    """Return all files except the receipts, which record who encoded them and when."""
    return {name: content for name, content in tree(root).items() if not name.startswith("commits/")}


def test_an_array_of_small_jobs_shares_the_tars(slurm: Slurm, models: Path, tars: Path, tmp_path: Path) -> None:
    words = precompute_arguments(models, tars, tmp_path / "root")
    flags = [*SMALL, "--nodes", "1", "--array", "0-1", "--output", str(tmp_path / "log-%a")]
    job = slurm.submit(*flags, PRECOMPUTE, *words, SHARDS="00000-00001", TARS_PER_TASK="1")
    for task in range(2):
        state = slurm.finish(f"{job}_{task}")
        assert (state["JobState"], state["ExitCode"]) == ("COMPLETED", "0:0"), (tmp_path / f"log-{task}").read_text()
        assert "Tars: 1 encoded" in (tmp_path / f"log-{task}").read_text()
    assert len(load_tars(open_store(tmp_path / "root"))) == 2
