"""The launcher: Slurm tasks, several hosts by ssh, signals, and exit codes."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from shards.base.errors import Preempted, RequestError, WorkError, exit_code_of
from tests import ranks
from tests.runs import PYTHON, compare, environment, last_step, launcher, train_fields, wait_until, write_config
from train import launch, slurm
from train import ssh as ssh_launcher
from train.__main__ import run
from train.data.spec import DataConfig
from train.run.checkpoints.checkpoint import list_checkpoints, step_of, verify_checkpoint
from train.run.preflight import World

SLURM_TASK = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": "gpu[003-004,012],login1",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_NODEID": "3",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "64",  # the whole job's, not the step's
}


def test_slurm_variables_are_converted_to_those_of_torchs_launcher() -> None:
    assert slurm.slurm_variables(SLURM_TASK) == {
        "RANK": "6",
        "WORLD_SIZE": "7",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "gpu003",
        "MASTER_PORT": str(15_000 + (31 * 1234567 + 2) % 15_000),
    }
    second = slurm.slurm_variables(SLURM_TASK | {"SLURM_NODEID": "1", "MASTER_ADDR": "head", "MASTER_PORT": "29500"})
    assert second["LOCAL_WORLD_SIZE"] == "2"
    assert (second["MASTER_ADDR"], second["MASTER_PORT"]) == ("head", "29500")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu1", "gpu1"),
        ("gpu1,gpu2", "gpu1"),
        ("gpu[1-4]", "gpu1"),
        ("gpu[09,10-12],cpu[1-2]", "gpu09"),
        ("rack[2-3]-node[010-020]", "rack2-node010"),
        ("a-[1].site.org,b", "a-1.site.org"),
    ],
)
def test_the_first_host_of_a_node_list_is_the_master(nodes: str, first: str) -> None:
    assert slurm.first_host(nodes) == first


@pytest.mark.parametrize(("text", "counts"), [("8", [8]), ("8(x2)", [8, 8]), ("2(x3),1,4(x2)", [2, 2, 2, 1, 4, 4])])
def test_tasks_per_node(text: str, counts: list[int]) -> None:
    assert slurm.tasks_per_node(text) == counts


@pytest.mark.parametrize("missing", [name for name in SLURM_TASK if name != "SLURM_NTASKS"])
def test_a_process_outside_srun_is_refused(missing: str) -> None:
    rest = {name: value for name, value in SLURM_TASK.items() if name != missing}
    remedy = "Start it with srun, as in `srun python -m train"
    with pytest.raises(RequestError, match=rf"{missing} is not set, so .* {remedy}"):
        slurm.slurm_variables(rest)


def test_a_slurm_task_becomes_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is replaced instead of starting a child, so that Slurm's signals reach the trainer."""
    monkeypatch.setattr(os, "environ", dict(SLURM_TASK))
    executed: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, arguments: executed.append([path, *arguments[1:]]))
    monkeypatch.setattr(sys, "argv", ["train.launch", "--slurm", "-m", "train", "--config", "a.yaml"])
    with pytest.raises(SystemExit) as ended:
        launch.main()
    assert ended.value.code == 0
    assert executed == [[sys.executable, "-m", "train", "--config", "a.yaml"]]
    assert os.environ["RANK"] == "6" and os.environ["WORLD_SIZE"] == "7"


def test_srun_without_the_launcher_is_refused(
    latents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, train_fields(latents, tmp_path / "run"))
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "7")
    assert exit_code_of(lambda: run(["--config", str(config)])) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert (
        "srun started 7 tasks, but WORLD_SIZE is not set, so each task would train separately in the same run folder"
        in message
    )
    assert "`srun python -m train.launch --slurm -m train --config" in message
    assert not (tmp_path / "run").exists()


def test_the_batch_sizes_of_cluster_md_suit_15_and_16_machines() -> None:
    page = " ".join((Path(__file__).parents[2] / "docs" / "how-to" / "cluster.md").read_text().split())
    (numbers,) = re.findall(r"`--global_batch_size (\d+)` \(divisible by 128, 120 and 64\), not (\d+)", page)
    good, bad = map(int, numbers)
    for machines in (16, 15):
        World(8 * machines, 8).check(None, good)
    assert good % DataConfig.model_fields["num_canonical_nodes"].default == 0
    World(128, 8).check(None, bad)
    match = rf"{bad} is not divisible by the number of processes \(120\)\. .* a multiple of 120\."
    with pytest.raises(RequestError, match=match):
        World(120, 8).check(None, bad)


SSH = """#!/bin/sh
test "$1 $3" = "-o -o" || exit 9
shift 4
test "$1" = away && exit 255
exec sh -c "$2"
"""
LAUNCHER = """#!{python}
import json, os, pathlib, sys
folder, rank = pathlib.Path(sys.argv[0]).parent, sys.argv[sys.argv.index("--machine_rank") + 1]
(folder / f"arguments-{{rank}}").write_text(json.dumps([str(pathlib.Path.cwd()), *sys.argv[1:]]))
if "killed-" + rank in sys.argv:
    os.kill(os.getpid(), 9)
if "code-" + rank in sys.argv:
    sys.exit(1)
if "wait" in sys.argv:
    for line in sys.stdin:
        with (folder / f"signals-{{rank}}").open("a") as file:
            file.write(line)
        if line != "SIGUSR2\\n":
            sys.exit(75)
"""


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a fake ssh that runs commands locally, a fake launcher that records its arguments, and files of
    hosts."""
    for name, text in (("ssh", SSH), ("python", LAUNCHER.format(python=sys.executable))):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PET_SHUTDOWN_TIMEOUT", "7")
    (tmp_path / "hosts").write_text("# a comment\nme@gpu1\n\ngpu2 # another\n")
    (tmp_path / "away").write_text("gpu1\naway\n")
    (tmp_path / "twice").write_text("gpu1\ngpu1\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    return tmp_path


def test_each_host_gets_its_own_launcher(machines: Path) -> None:
    assert launch.launch_on_hosts([str(machines / "hosts"), "2", "8", "--quiet", "-m", "mine", "--run_dir", "a b"]) == 0
    for rank in range(2):
        folder, *arguments = json.loads((machines / f"arguments-{rank}").read_text())
        assert folder == os.getcwd()
        machine_flags = f"--num_machines 2 --machine_rank {rank} --main_process_ip gpu1 --main_process_port 29500"
        assert arguments[:3] == ["-m", "train.launch", "--signals-from-stdin"]
        assert arguments[3:] == [
            *machine_flags.split(),
            "--num_processes",
            "16",
            "--multi_gpu",
            "--quiet",
            "-m",
            "mine",
            "--run_dir",
            "a b",
        ]


def test_signals_are_forwarded_and_a_failed_launcher_stops_the_others(machines: Path) -> None:
    before = [signal.getsignal(number) for number in ssh_launcher.FORWARDED]

    def send_signals() -> None:
        wait_until(lambda: len([path for path in machines.glob("arguments-*") if path.read_text()]) == 2)
        os.kill(os.getpid(), signal.SIGUSR2)
        wait_until(lambda: len([path for path in machines.glob("signals-*") if path.read_text()]) == 2)
        os.kill(os.getpid(), signal.SIGUSR1)

    sender = threading.Thread(target=send_signals)
    sender.start()
    assert launch.launch_on_hosts([str(machines / "hosts"), "2", "8", "wait"]) == 75
    sender.join()
    assert [(machines / f"signals-{rank}").read_text() for rank in range(2)] == ["SIGUSR2\nSIGUSR1\n"] * 2
    (machines / "signals-0").unlink()
    assert launch.launch_on_hosts([str(machines / "hosts"), "2", "8", "wait", "code-1"]) == 1
    assert (machines / "signals-0").read_text() == "SIGTERM\n"
    assert [signal.getsignal(number) for number in ssh_launcher.FORWARDED] == before
    with pytest.raises(WorkError, match=r"The launcher on gpu2 was killed by signal 9\. Signal 9 often means that"):
        launch.launch_on_hosts([str(machines / "hosts"), "2", "8", "wait", "killed-1"])


def test_a_launcher_receives_signals_through_its_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(number))
    monkeypatch.setattr(sys, "stdin", io.StringIO("SIGUSR2\nSIGUSR1\n"))
    ssh_launcher.receive_signals()
    for thread in threading.enumerate():
        if thread.name == "signals":
            thread.join()
    assert sent == [signal.SIGUSR2, signal.SIGUSR1, signal.SIGTERM]


@pytest.mark.parametrize(
    ("file", "arguments", "message"),
    [
        (
            "away",
            ["2", "1", "wait"],
            "ssh could not reach away, or lost the connection .* `ssh away true` must work without a pass",
        ),
        ("hosts", ["3", "1", "x"], "names 2 hosts, but --hosts requests 3"),
        (
            "hosts",
            ["0", "1", "x"],
            "--hosts must be followed by a hosts file, the number of hosts .*, as in `python -m train.launch",
        ),
        ("hosts", ["2", "1"], "--hosts must be followed by a hosts file"),
        ("absent", ["2", "1", "x"], "absent cannot be read: No such file or directory"),
        ("ssh", ["2", "1", "x"], "contains 'test .*, which is not a host name"),
        ("twice", ["2", "1", "x"], "names the host 'gpu1' twice"),
        (
            "binary",
            ["2", "1", "x"],
            r"binary cannot be read: it is not a text file in UTF-8\. Pass a file with one host",
        ),
    ],
)
def test_invalid_hosts_are_refused(machines: Path, file: str, arguments: list[str], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        launch.launch_on_hosts([str(machines / file), *arguments])


@pytest.fixture(params=["fake", pytest.param("sshd", marks=pytest.mark.slurm)])
def ssh(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A folder with a fake ssh that runs commands locally, or with OpenSSH's client and a server on this machine."""
    program = tmp_path / "ssh"
    if request.param == "fake":
        program.write_text(SSH)
        program.chmod(0o755)
        yield tmp_path
        return
    for name in ("server", "client"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True)
    port = ranks.free_port()
    (tmp_path / "config").write_text(
        f"Host *\n  Port {port}\n  IdentityFile {tmp_path}/client\n  StrictHostKeyChecking no\n"
        f"  BatchMode yes\n  ConnectTimeout 10\n"
        f"  UserKnownHostsFile {tmp_path}/known\n"
    )
    program.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {tmp_path}/config "$@"\n')
    program.chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd's privilege separation directory
    flags = [f"HostKey={tmp_path}/server", f"AuthorizedKeysFile={tmp_path}/client.pub", "StrictModes=no"]
    flags += [f"Port={port}", f"PidFile={tmp_path}/pid", "ListenAddress=127.0.0.1", "ListenAddress=::1"]
    flags += ["PasswordAuthentication=no", "KbdInteractiveAuthentication=no"]
    server = subprocess.Popen(
        ["/usr/sbin/sshd", "-D", "-q", "-f", "/dev/null", *(word for flag in flags for word in ("-o", flag))]
    )
    try:
        wait_until(lambda: subprocess.run([program, "localhost", "true"]).returncode == 0, process=server)
        yield tmp_path
    finally:
        server.terminate()
        server.wait()


@pytest.mark.slow
def test_two_hosts_train_stop_and_resume(ssh: Path, latents: Path, tmp_path: Path) -> None:
    """The run is stopped by a signal, then killed, then finishes, with the loss curve of an undisturbed run."""
    (tmp_path / "hosts").write_text("localhost\n127.0.0.1\n")
    fields = train_fields(latents, tmp_path / "run", max_steps=300, checkpoint={"every": 20}, collective_timeout=60.0)
    command = [*PYTHON, "-m", "train.launch", "--hosts", str(tmp_path / "hosts"), "2", "1", "--mixed_precision", "no"]
    command += ["--dynamo_backend", "no", "--quiet", "-m", "train", "--config", str(write_config(tmp_path, fields))]
    path = f"{ssh}{os.pathsep}{os.environ['PATH']}"
    for number, step, code in ((signal.SIGUSR1, 50, 75), (signal.SIGKILL, 120, -9), (None, 300, 0)):
        with (tmp_path / "log").open("a") as log:
            variables = environment(PATH=path, MASTER_PORT=str(ranks.free_port()))
            process = subprocess.Popen(command, env=variables, stdout=log, stderr=subprocess.STDOUT)
        if number is not None:
            wait_until(lambda: last_step(tmp_path / "run") >= step, process=process, log=tmp_path / "log")  # noqa: B023
            process.send_signal(number)
        assert process.wait(300) == code, (tmp_path / "log").read_text()
    output = (tmp_path / "log").read_text()
    assert output.count("resuming") == 2, output  # once per launch, by the main process
    ranks.run(
        tmp_path / "whole.log",
        ["--config", str(write_config(tmp_path, fields | {"run_dir": str(tmp_path / "whole")}))],
        2,
    )
    compare(tmp_path / "run", tmp_path / "whole")


def pid_of(process: ForkServerProcess) -> int:
    """Return the id of a started process."""
    assert process.pid is not None
    return process.pid


SAVES_SLOWLY = """
import pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
signal.signal(signal.SIGTERM, lambda *_: (folder / f"sigterm-{time.monotonic_ns()}").touch())
signal.signal(signal.SIGINT, lambda *_: None)
(folder / f"ready-{time.monotonic_ns()}").touch()
while True:
    time.sleep(0.05)
"""
DEFAULT_HANDLERS = """
import pathlib, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_DFL)
(pathlib.Path(sys.argv[1]) / f"ready-{time.monotonic_ns()}").touch()
time.sleep(600)
"""


def start_launcher(folder: Path, num_processes: int, *arguments: str, **variables: str) -> ForkServerProcess:
    """Start a launcher in its own process group, as a shell does. Its standard error goes to `folder`/errors."""
    words = [*launcher(num_processes)[3:], *arguments]
    errors, program = folder / "errors", "tests.ranks:launch"
    (process,) = ranks.start(folder / "output", words, program=program, errors=errors, variables=variables)
    return process


def wait_for(folder: Path, pattern: str, count: int, process: ForkServerProcess | subprocess.Popen[bytes]) -> None:
    """Wait until `count` files match the pattern, while the process runs."""
    wait_until(lambda: len(list(folder.glob(pattern))) >= count, process=process, log=folder / "errors")


Send = Callable[[int, int], None]
"""Sends a signal to all processes of a group, as a terminal does on Ctrl-C, or to the launcher only, as a scheduler
may."""


@pytest.mark.parametrize(
    ("num_processes", "send", "number"),
    [
        (1, os.killpg, signal.SIGINT),
        (1, os.kill, signal.SIGTERM),
        pytest.param(1, os.kill, signal.SIGHUP, marks=pytest.mark.slow),
        pytest.param(1, os.killpg, signal.SIGHUP, marks=pytest.mark.slow),
        pytest.param(2, os.killpg, signal.SIGINT, marks=pytest.mark.slow),
    ],
    ids=["Ctrl-C", "SIGTERM", "SIGHUP", "a closed terminal", "Ctrl-C, 2 processes"],
)
def test_the_run_saves_before_its_processes_and_the_launcher_exit(
    latents: Path, tmp_path: Path, num_processes: int, send: Send, number: signal.Signals
) -> None:
    changes = {"max_steps": 100_000, "checkpoint": {"every": 100_000}, "data": {"num_workers": 1}}
    config = write_config(tmp_path, train_fields(latents, tmp_path / "run", **changes))
    process = start_launcher(tmp_path, num_processes, "-m", "train", "--config", str(config))
    wait_until(lambda: last_step(tmp_path / "run") >= 2, process=process, log=tmp_path / "errors")
    send(pid_of(process), number)
    assert ranks.wait([process], 120) == [75]
    errors = " ".join((tmp_path / "errors").read_text().split())
    assert "Traceback" not in errors
    (folder,) = list_checkpoints(tmp_path / "run")
    assert f"received a stop signal and saved a checkpoint after step {step_of(folder)}" in errors
    assert f"The launcher received {number.name}, and the run saved a checkpoint. Run the same command again" in errors
    verify_checkpoint(folder)


def test_processes_are_stopped_although_nothing_can_be_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, `make train … | tee log` whose `tee` ended first."""
    child, stderr = subprocess.Popen(["sleep", "60"]), Mock()
    stderr.write.side_effect = BrokenPipeError
    monkeypatch.setattr("sys.stderr", stderr)
    shutdown = launch.Shutdown()
    monkeypatch.setenv("PET_SHUTDOWN_TIMEOUT", "60")
    monkeypatch.setattr(launch, "child_processes", lambda: {child.pid: 0})
    with pytest.raises(launch.Stopped):
        shutdown.handle(signal.SIGTERM)
    assert shutdown.exit_codes == [-signal.SIGTERM] and stderr.write.called
    child.wait()


def test_a_process_that_another_signal_killed_is_named() -> None:
    """It may have trained before, so the message must not say that there was nothing to save."""
    shutdown = launch.Shutdown()
    shutdown.received, shutdown.exit_codes = signal.SIGTERM, [0, -signal.SIGKILL]
    with pytest.raises(Preempted, match="received SIGTERM, but SIGKILL killed a process of the run"):
        shutdown.exit_code()


@pytest.mark.parametrize(("num_processes", "send"), [(1, os.killpg), (2, os.kill)])
def test_a_second_ctrl_c_kills_the_processes(tmp_path: Path, num_processes: int, send: Send) -> None:
    """The processes ignore SIGTERM, which they receive after the first Ctrl-C."""
    (tmp_path / "slow.py").write_text(SAVES_SLOWLY)
    process = start_launcher(tmp_path, num_processes, str(tmp_path / "slow.py"), str(tmp_path))
    wait_for(tmp_path, "ready-*", num_processes, process)
    send(pid_of(process), signal.SIGINT)
    wait_for(tmp_path, "sigterm-*", num_processes, process)
    trainers = psutil.Process(process.pid).children()
    assert len(trainers) == num_processes
    send(pid_of(process), signal.SIGINT)
    assert ranks.wait([process], 120) == [130]
    for trainer in trainers:
        with suppress(psutil.NoSuchProcess):
            assert trainer.status() == psutil.STATUS_ZOMBIE  # dead, and not yet reaped by the system
    errors = " ".join((tmp_path / "errors").read_text().split())
    assert "Press Ctrl-C again to kill it without saving" in errors and "Traceback" not in errors
    assert "Ctrl-C was pressed twice, so the processes were killed." in errors


def test_processes_that_do_not_exit_in_time_are_killed(tmp_path: Path) -> None:
    num_processes = 2
    (tmp_path / "slow.py").write_text(SAVES_SLOWLY)
    arguments = (str(tmp_path / "slow.py"), str(tmp_path))
    process = start_launcher(tmp_path, num_processes, *arguments, PET_SHUTDOWN_TIMEOUT="1")
    wait_for(tmp_path, "ready-*", num_processes, process)
    os.kill(pid_of(process), signal.SIGTERM)
    assert ranks.wait([process], 120) == [75]
    errors = " ".join((tmp_path / "errors").read_text().split())
    assert len(list(tmp_path.glob("sigterm-*"))) == num_processes
    assert "did not exit within 1 s and was killed" in errors and "raise PET_SHUTDOWN_TIMEOUT" in errors


@pytest.mark.parametrize(("num_processes", "number", "code"), [(1, signal.SIGTERM, 75), (2, signal.SIGINT, 130)])
def test_a_signal_before_the_first_step_saves_nothing(
    tmp_path: Path, num_processes: int, number: signal.Signals, code: int
) -> None:
    (tmp_path / "early.py").write_text(DEFAULT_HANDLERS)
    process = start_launcher(tmp_path, num_processes, str(tmp_path / "early.py"), str(tmp_path))
    wait_for(tmp_path, "ready-*", num_processes, process)
    os.killpg(pid_of(process), number)
    assert ranks.wait([process], 120) == [code]
    errors = " ".join((tmp_path / "errors").read_text().split())
    assert f"received {number.name} before the first step, so this launch saved nothing. Run the same" in errors
    assert "Traceback" not in errors


def test_ctrl_c_reaches_one_process_on_one_host(tmp_path: Path) -> None:
    """Through a local ssh, with the launchers and the process as Python starts them: the first Ctrl-C makes the process
    save, the second kills it."""
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    (tmp_path / "hosts").write_text("localhost\n")
    (tmp_path / "script.py").write_text(SAVES_SLOWLY)
    arguments = ["--hosts", str(tmp_path / "hosts"), "1", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    with (tmp_path / "errors").open("w") as errors:
        process = subprocess.Popen(
            [*PYTHON, "-m", "train.launch", *arguments, "--quiet", str(tmp_path / "script.py"), str(tmp_path)],
            env=environment(PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}"),
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )
    for pattern in ("ready-*", "sigterm-*"):
        wait_for(tmp_path, pattern, 1, process)
        os.killpg(process.pid, signal.SIGINT)
    assert process.wait(120) == 130
    printed = " ".join((tmp_path / "errors").read_text().split())
    assert "Traceback" not in printed and len(list(tmp_path.glob("sigterm-*"))) == 1
    assert "Ctrl-C was pressed twice" in printed


@pytest.mark.parametrize("code", [0, 75])
def test_the_launcher_returns_the_exit_code_of_a_single_process(tmp_path: Path, code: int) -> None:
    (tmp_path / "exit.py").write_text(f"import sys; sys.exit({code})")
    assert ranks.wait([start_launcher(tmp_path, 1, str(tmp_path / "exit.py"))], 120) == [code]


@pytest.mark.parametrize(("code", "starts"), [(75, 1), (2, 1), (1, 2)])
def test_only_lost_processes_are_restarted(tmp_path: Path, code: int, starts: int) -> None:
    """Not those that stopped after a signal to one of them, or were refused."""
    (tmp_path / "exit.py").write_text(
        "import os, sys\n"
        "open(sys.argv[1] + '/start-' + os.environ['TORCHELASTIC_RESTART_COUNT'], 'w')\n"
        f"sys.exit({code})\n"
    )
    arguments = ("--max_restarts", "1", str(tmp_path / "exit.py"), str(tmp_path))
    assert ranks.wait([start_launcher(tmp_path, 2, *arguments)], 120) == [code]
    assert len(list(tmp_path.glob("start-*"))) == starts


def test_a_process_that_has_just_ended_does_not_hide_the_exit_code() -> None:
    """Torch's launcher may find a process running and then fail to signal it. This happened once in a test."""
    process = SubprocessHandler("true", (), {}, None, None, 0, None)
    process.proc.wait()
    with pytest.raises(ProcessLookupError):
        process.close()
    with launch.restarting_only_lost_processes(launch.Shutdown()):
        process.close()


def check_again() -> None:
    LocalElasticAgent._monitor_workers(Mock(), Mock())
    pytest.fail("torch's launcher would now restart the processes")


def find_killed() -> None:
    raise subprocess.CalledProcessError(-signal.SIGKILL, "python")


@pytest.mark.parametrize(("words", "go_on"), [("1", find_killed), ("2 --multi_gpu", check_again)])
def test_a_lost_stop_signal_still_decides_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, words: str, go_on: Callable[[], None]
) -> None:
    """The signal arrives in a finalizer, where Python discards the exception. The launcher then finds that its process
    was killed, or checks its processes again, and restarts none."""

    def lose_signal(_: object) -> None:
        with suppress(BaseException):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        go_on()

    for name in ("PET_SHUTDOWN_TIMEOUT", "PET_SIGNALS_TO_HANDLE"):  # restored after the test
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", lambda *_: RunResult(WorkerState.FAILED))
    monkeypatch.setattr("accelerate.commands.launch.launch_command", lose_signal)
    monkeypatch.setattr("train.launch.child_processes", dict)
    with pytest.raises(Preempted, match="The launcher received SIGTERM"):
        launch.launch(["--num_processes", *words.split(), "script.py"])
