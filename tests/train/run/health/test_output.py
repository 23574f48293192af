"""Each rank's output: all of it, from whoever prints, to the last word; and people see what they saw before."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests import ranks
from tests.runs import PYTHON, environment, train_fields, write_config

PROGRAM = """
import os, signal, subprocess, sys
from pathlib import Path
from train.run.health.output import kept
print("before", flush=True)
with kept(Path(sys.argv[1]) / "logs" / "0007", int(sys.argv[2]), 2):
    print("python", flush=True)
    print("warns", file=sys.stderr, flush=True)
    os.system("echo a child")
    os.killpg(0, signal.SIGUSR1)
    {end}
print("after")
"""


def run(folder: Path, rank: int, end: str, together: bool = False) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a process that keeps its output."""
    program = "import signal; signal.signal(signal.SIGUSR1, lambda *_: print('told', flush=True))" + PROGRAM.format(
        end=end
    )
    stderr = subprocess.STDOUT if together else subprocess.PIPE
    done = subprocess.run(
        [*PYTHON, "-c", textwrap.dedent(program), str(folder), str(rank)],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env=environment(),
        start_new_session=True,
        timeout=60,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("rank", [0, 3])
def test_all_that_a_rank_says_is_kept_and_seen(tmp_path: Path, rank: int) -> None:
    code, output, errors = run(tmp_path, rank, "print('the end')")
    assert code == 0 and errors == "warns\n"
    assert output == "before\npython\na child\ntold\nthe end\nafter\n"
    kept = (tmp_path / "logs" / "0007" / f"rank-{rank:05d}.log").read_text()
    assert sorted(kept.splitlines()) == ["a child", "python", "the end", "told", "warns"]


def test_what_a_killed_rank_said_last_is_kept_and_seen(tmp_path: Path) -> None:
    code, output, _ = run(tmp_path, 3, "os.write(2, b'last words\\n'); os.kill(os.getpid(), signal.SIGKILL)", True)
    assert code == -signal.SIGKILL
    assert output == "before\npython\nwarns\na child\ntold\nlast words\n"  # in order: one file for both
    assert output.endswith((tmp_path / "logs" / "0007" / "rank-00003.log").read_text())


def test_the_error_is_kept_with_its_traceback_and_old_launches_go(tmp_path: Path) -> None:
    for number in (3, 5, 6, 12):
        (tmp_path / "logs" / f"{number:04d}").mkdir(parents=True)
    code, _, errors = run(tmp_path, 0, "raise MemoryError('full')")
    assert code == 1 and "MemoryError: full" in errors
    kept = (tmp_path / "logs" / "0007" / "rank-00000.log").read_text()
    assert "Traceback" in kept and "MemoryError: full" in kept
    assert sorted(os.listdir(tmp_path / "logs")) == ["0006", "0007", "0012"]


def test_each_rank_of_a_run_has_its_own(latents: Path, tmp_path: Path) -> None:
    fields = train_fields(latents, tmp_path / "run", max_steps=2)
    config = write_config(tmp_path, fields)
    said = ranks.run(tmp_path / "log", ["--config", str(config)], 2)
    logs = tmp_path / "run" / "logs" / "0001"
    assert sorted(os.listdir(logs)) == ["rank-00000.log", "rank-00001.log"]
    assert '"step": 2' in said and '"step": 2' in (logs / "rank-00000.log").read_text()
    assert '"step": 2' not in (logs / "rank-00001.log").read_text()
    config = write_config(tmp_path, fields | {"max_steps": 4, "log": {**fields["log"], "keep_output": 0}})
    ranks.run(tmp_path / "log", ["--config", str(config)])
    assert os.listdir(logs.parent) == ["0001"]


def test_a_terminal_stays_a_terminal(tmp_path: Path) -> None:
    """The main process's, on which the bar is; another's is copied."""
    script = "import pty, sys; sys.exit(pty.spawn(sys.argv[1:]) >> 8)"
    program = PROGRAM.format(end="print(os.isatty(1), os.isatty(2))").replace("os.killpg(0, signal.SIGUSR1)", "pass")
    for rank, is_terminal in ((0, True), (1, False)):
        command = [sys.executable, "-c", script, sys.executable, "-c", program, str(tmp_path), str(rank)]
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment(), timeout=60, stdin=subprocess.DEVNULL
        )
        assert f"{is_terminal} {is_terminal}" in done.stdout, done
    logs = tmp_path / "logs" / "0007"
    assert (logs / "rank-00000.log").exists() is False or (logs / "rank-00000.log").read_text() == ""
    assert "False False" in (logs / "rank-00001.log").read_text()


def test_the_error_that_ends_a_rank_stays_what_it_is_where_its_folder_is_gone(tmp_path: Path) -> None:
    log = "(Path(sys.argv[1]) / 'logs' / '0007' / 'rank-00003.log')"
    written = f"{log}.exists() and {{'told', 'warns'}} <= set({log}.read_text().split())"  # both copies have it open
    end = f"import shutil\n    while not ({written}): pass\n    shutil.rmtree(sys.argv[1]); raise SystemExit(75)"
    code, output, errors = run(tmp_path / "run", 3, end)
    assert code == 75 and output == "before\npython\na child\ntold\n" and errors == "warns\n"
