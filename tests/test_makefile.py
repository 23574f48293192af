"""`make`: errors for missing variables, and the commands that its targets run. No test installs or runs anything."""

import re
import shlex
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser

from tests.makefile import make

CLUSTER = Path("docs/how-to/cluster.md")
MAKEFILE = Path("Makefile")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train"], "make train needs PHASE or CONFIG. Usage: make train PHASE=1 [CONFIG=path.yaml]"),
        (["plan", "FAMILY=flux"], "FAMILY=flux is not a folder in configs/. The families are flux1 pixart-sigma"),
        (["precompute"], "make precompute needs SHARD. Usage: make precompute SHARD=00000-00099"),
        (["sample", "PROMPTS=p.txt"], "make sample needs RUN. Usage: make sample RUN=runs/phase2 PROMPTS=prompts.txt"),
        (["sample", "RUN=runs/a"], "make sample needs PROMPTS. Usage: make sample RUN=runs/phase2 PROMPTS=prompts.txt"),
        (["evaluate"], "make evaluate needs RUN. Usage: make evaluate RUN=runs/phase2"),
        (["study", "B=runs/b"], "make study needs A. Usage: make study A=runs/a/evaluations/… B=runs/b"),
        (["study", "A=runs/a"], "make study needs B. Usage: make study A=runs/a/evaluations/… B=runs/b"),
        (["watch", "PROMPTS=p.txt"], "make watch needs RUN. Usage: make watch RUN=runs/phase2 PROMPTS=prompts.txt"),
        (["watch", "RUN=runs/a"], "make watch needs PROMPTS. Usage: make watch RUN=runs/phase2 PROMPTS=prompts.txt"),
        (["report"], 'make report needs RUN. Usage: make report RUN="runs/phase1 runs/phase2"'),
        (["select"], "make select needs METADATA. Usage: make select METADATA=metadata/"),
    ],
)
def test_missing_and_wrong_arguments(words: list[str], message: str) -> None:
    result = make(*words)
    assert result.returncode == 2
    assert message in result.stderr and not result.stdout


def test_help_names_every_target() -> None:
    result = make("--silent", "help")
    assert result.returncode == 0
    targets = set(re.findall(r"(?m)^([a-z0-9-]+):", MAKEFILE.read_text())) - {"help", "check-lock"}
    assert set(re.findall(r"(?m)^make ([a-z0-9-]+)", result.stdout)) == targets


def test_a_family_is_a_folder_of_configs() -> None:
    result = make("--dry-run", "precompute", "FAMILY=pixart-sigma", "SHARD=all")
    assert '-m precompute --config "configs/pixart-sigma/precompute.yaml" --shards all' in result.stdout
    result = make("--dry-run", "train", "FAMILY=sana", "PHASE=2")
    assert '-m train check --config "configs/sana/phase2.yaml"' in result.stdout
    result = make("--dry-run", "plan", "FAMILY=sd3", "GPUS=64")
    assert '-m plan --config "configs/sd3/plan.yaml" --gpus 64' in result.stdout


def test_what_a_target_runs() -> None:
    """The request is checked in one process, then launched with the requested number."""
    result = make("--dry-run", "train", "PHASE=1", "NPROC=2", "ARGS=--max_steps 5")
    check, launch = (line for line in result.stdout.replace("\\\n", "").splitlines() if "-m train" in line)
    assert launch.startswith("PET_SHUTDOWN_TIMEOUT=120 exec ") and "--max_restarts 3" in launch
    assert check.endswith('-m train check --config "configs/phase1.yaml" --max_steps 5')
    assert "-m train.launch --num_machines 1 --num_processes 2 --multi_gpu" in launch
    study = make("--dry-run", "study", "A=a", "B=b", "C=c", "OUT=o", "ARGS=--protocol.seed 1").stdout
    assert '-m evaluation.study prepare --sets "a,b,c" --config "configs/study.yaml" --output "o" --proto' in study
    assert '-m evaluation.study serve --config "configs/study.yaml" --output "o" --protocol.seed 1' in study
    assert launch.endswith('-m train --config "configs/phase1.yaml" --num_processes $((1 * 2)) --max_steps 5')
    assert result.stdout.splitlines()[-1] == launch  # resume.md tells readers to take the last line


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        (["select", "METADATA=a b/*.parquet", "OUT=c d"], ["--metadata", "a b/*.parquet", "--output", "c d"]),
        (["download", "IN=a b", "OUT=c*"], ["--input", "a b", "--output", "c*"]),
        (
            ["sample", "RUN=a b", "PROMPTS=c d", "OUT=e f"],
            ["--model", "a b", "--prompts.file", "c d", "--output", "e f"],
        ),
        (["watch", "RUN=a b", "PROMPTS=c d", "OUT=e f"], ["watch", "a b", "--prompts.file", "c d", "--output", "e f"]),
        (["report", "RUN=a b", "OUT=c d"], ["report", "a", "b", "--output", "c d"]),
        (["study", "A=a b", "B=c", "D=d e", "OUT=f g"], ["--sets", "a b,c,d e", "--output", "f g"]),
        (["gpu-check", "OUT=a b"], ["--output", "a b"]),
        (["report", "RUN=~/a ~/b,c", "OUT=~/d"], [str(Path.home() / name) for name in ("a", "b,c", "d")]),
    ],
)
def test_a_path_may_contain_spaces_and_wildcards(words: list[str], arguments: list[str]) -> None:
    line, *_ = (line for line in make("--dry-run", *words).stdout.splitlines() if " -m " in line)
    assert set(arguments) <= set(shlex.split(line))


def test_several_machines_are_one_number_under_slurm() -> None:
    refused = make("train", "PHASE=1", "NODES=2")
    assert refused.returncode == 2 and "NODES=2 needs a Slurm allocation" in refused.stderr
    result = make("--dry-run", "train", "PHASE=1", "NODES=2", "NPROC=8", "SLURM_JOB_ID=7")
    check, launch = (line for line in result.stdout.replace("\\\n", "").splitlines() if "-m train" in line)
    assert "srun" not in check
    assert "exec srun --nodes 2 --ntasks-per-node 8 --wait 120 .venv/bin/python -m train.launch --slurm" in launch
    assert launch.rstrip().endswith('-m train --config "configs/phase1.yaml" --num_processes $((2 * 8))')
    for tasks, flag in (("8(x2)", " --cpus-per-task 6"), ("8", " --cpus-per-task 6"), ("1(x2)", "")):
        allocation = ("SLURM_JOB_ID=7", "SLURM_CPUS_PER_TASK=6", f"SLURM_TASKS_PER_NODE={tasks}")
        result = make("--dry-run", "train", "PHASE=1", "NODES=2", "NPROC=8", *allocation)
        assert f"srun --nodes 2 --ntasks-per-node 8{flag} --wait 120 .venv" in result.stdout


def test_several_machines_are_one_number_with_a_file_of_hosts(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# ours\na\n\nb\nc # new\n")
    hosts = f"HOSTS={tmp_path / 'hosts'}"
    for words, machines in (([], 3), (["NODES=2", "SLURM_JOB_ID=7"], 2)):
        result = make("--dry-run", "train", "PHASE=1", "NPROC=8", hosts, *words)
        launch = result.stdout.replace("\\\n", "").splitlines()[-1]
        assert "srun" not in launch and f"-m train.launch --hosts {tmp_path / 'hosts'} {machines} 8 --max_re" in launch
        assert launch.rstrip().endswith(f'-m train --config "configs/phase1.yaml" --num_processes $(({machines} * 8))')
    refused = make("train", "PHASE=1", "HOSTS=absent")
    assert (
        refused.returncode == 2
        and "HOSTS=absent does not exist. HOSTS must be a file with one host name per line" in refused.stderr
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_page_has_typed_on_each_of_two_machines(rank: int) -> None:
    (line,) = re.findall(r"(?m)^make (train .*--machine_rank 0.*)$", CLUSTER.read_text())
    words = shlex.split(line.replace("--machine_rank 0", f"--machine_rank {rank}").replace("HOST", "10.0.0.1"))
    launch = make("--dry-run", *words).stdout.replace("\\\n", "").splitlines()[-1]
    flags = shlex.split(launch.split("-m train.launch")[1])
    found = launch_command_parser().parse_args(flags)
    assert (found.num_machines, found.machine_rank, found.num_processes, found.multi_gpu) == (2, rank, 16, True)
    assert (found.main_process_ip, found.main_process_port) == ("10.0.0.1", 29500)
    assert found.module and found.training_script == "train"
    assert found.training_script_args[:2] == ["--config", "configs/phase1.yaml"]
