"""Log files of ranks contain everything that a rank and its children print, and the console still shows it."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests import ranks
from tests.runs import PYTHON, environment, train_fields, write_config
from train.__main__ import run as command

PROGRAM = """
import os, signal, subprocess, sys
from pathlib import Path
from train.run.health.output import tee_output
print("before", flush=True)
with tee_output(Path(sys.argv[1]) / "logs" / "0007", int(sys.argv[2]), 2):
    print("python", flush=True)
    print("warning", file=sys.stderr, flush=True)
    os.system("echo a child")
    os.killpg(0, signal.SIGUSR1)
    {end}
print("after")
"""


def run(folder: Path, rank: int, end: str, one_stream: bool = False) -> tuple[int, str, str]:
    """Run PROGRAM with `end` as its last statement. Return the exit code, standard output and standard error.

    Args:
        one_stream: standard error is the same file as standard output.
    """
    handler = "import signal; signal.signal(signal.SIGUSR1, lambda *_: print('signal', flush=True))"
    finished = subprocess.run(
        [*PYTHON, "-c", textwrap.dedent(handler + PROGRAM.format(end=end)), str(folder), str(rank)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if one_stream else subprocess.PIPE,
        text=True,
        env=environment(PYTHONUNBUFFERED=""),  # if it is set, print writes the end of a line separately
        start_new_session=True,
        timeout=60,
    )
    return finished.returncode, finished.stdout, finished.stderr


@pytest.mark.parametrize("rank", [0, 3])
def test_output_of_a_rank_is_copied_and_shown(tmp_path: Path, rank: int) -> None:
    code, output, errors = run(tmp_path, rank, "print('the end')")
    assert code == 0 and errors == "warning\n"
    assert output == "before\npython\na child\nsignal\nthe end\nafter\n"
    log = (tmp_path / "logs" / "0007" / f"rank-{rank:05d}.log").read_text()
    assert sorted(log.splitlines()) == ["a child", "python", "signal", "the end", "warning"]


def test_the_last_output_of_a_killed_rank_is_copied_and_shown(tmp_path: Path) -> None:
    code, output, _ = run(tmp_path, 3, "os.write(2, b'last words\\n'); os.kill(os.getpid(), signal.SIGKILL)", True)
    assert code == -signal.SIGKILL
    assert output == "before\npython\nwarning\na child\nsignal\nlast words\n"  # in order, as both streams share a file
    assert output.endswith((tmp_path / "logs" / "0007" / "rank-00003.log").read_text())


def test_the_log_ends_with_the_traceback_and_old_logs_are_deleted(tmp_path: Path) -> None:
    for number in (3, 5, 6, 12):
        (tmp_path / "logs" / f"{number:04d}").mkdir(parents=True)
    code, _, errors = run(tmp_path, 0, "raise MemoryError('full')")
    assert code == 1 and "MemoryError: full" in errors
    log = (tmp_path / "logs" / "0007" / "rank-00000.log").read_text()
    assert "Traceback" in log and "MemoryError: full" in log
    assert sorted(os.listdir(tmp_path / "logs")) == ["0006", "0007", "0012"]


def test_each_rank_of_a_run_has_a_log(latents: Path, tmp_path: Path) -> None:
    fields = train_fields(latents, tmp_path / "run", max_steps=2)
    config = write_config(tmp_path, fields)
    output = ranks.run(tmp_path / "log", ["--config", str(config)], 2)
    logs = tmp_path / "run" / "logs" / "0001"
    assert sorted(os.listdir(logs)) == ["rank-00000.log", "rank-00001.log"]
    assert '"step": 2' in output and '"step": 2' in (logs / "rank-00000.log").read_text()
    assert '"step": 2' not in (logs / "rank-00001.log").read_text()
    config = write_config(tmp_path, fields | {"max_steps": 4, "log": {**fields["log"], "keep_output": 0}})
    command(["--config", str(config)])
    assert os.listdir(logs.parent) == ["0001"]


def test_the_terminal_of_the_main_process_stays_a_terminal(tmp_path: Path) -> None:
    """The progress bar needs it. The terminal of another rank is copied."""
    script = "import pty, sys; sys.exit(pty.spawn(sys.argv[1:]) >> 8)"
    program = PROGRAM.format(end="print(os.isatty(1), os.isatty(2))").replace("os.killpg(0, signal.SIGUSR1)", "pass")
    for rank, is_terminal in ((0, True), (1, False)):
        command = [sys.executable, "-c", script, sys.executable, "-c", program, str(tmp_path), str(rank)]
        finished = subprocess.run(
            command, capture_output=True, text=True, env=environment(), timeout=60, stdin=subprocess.DEVNULL
        )
        assert f"{is_terminal} {is_terminal}" in finished.stdout, finished
    logs = tmp_path / "logs" / "0007"
    assert (logs / "rank-00000.log").exists() is False or (logs / "rank-00000.log").read_text() == ""
    assert "False False" in (logs / "rank-00001.log").read_text()


def test_an_error_is_raised_unchanged_if_the_log_folder_is_gone(tmp_path: Path) -> None:
    log = "(Path(sys.argv[1]) / 'logs' / '0007' / 'rank-00003.log')"
    both_opened = f"{log}.exists() and {{'signal', 'warning'}} <= set({log}.read_text().split())"
    end = f"import shutil\n    while not ({both_opened}): pass\n    shutil.rmtree(sys.argv[1]); raise SystemExit(75)"
    code, output, errors = run(tmp_path / "run", 3, end)
    assert code == 75 and output == "before\npython\na child\nsignal\n" and errors == "warning\n"
