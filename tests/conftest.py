"""How the tests run: the longest files first; failures and figures are printed at once. tests/fixtures.py has the
fixtures that all tests share."""

import gc
import json
import os
import sys
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
# a busy machine starts Ray's processes slowly, and Ray allows them only 15 s
os.environ["RAY_raylet_start_wait_time_s"] = "300"  # noqa: SIM112
os.environ["RAY_agent_register_timeout_ms"] = "300000"  # noqa: SIM112
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112

FIXTURES = "tests.fixtures"
pytest.register_assert_rewrite(FIXTURES)

LONGEST_FIRST = (
    "faults/test_steps.py",
    "bench/gpu_check/test_gpu_check.py",
    "train/run/test_remote_run.py",
    "families/test_compiling.py",
    "train/model/test_memory.py",
    "families/test_training.py",
    "cluster/test_ray.py",
    "train/objective/test_alignment.py",
    "train/test_run.py",
    "evaluation/watch/test_watch.py",
    "train/run/test_processes.py",
    "train/export/test_single_file.py",
    "train/model/test_sharding.py",
    "train/run/reporting/test_evaluations.py",
    "families/test_projection.py",
    "test_end_to_end.py",
    "train/test_curves.py",
    "faults/test_train_faults.py",
    "train/data/test_files.py",
    "precompute/pixels/test_isolation.py",
    "test_docs.py",
    "plan/arithmetic/test_work.py",
    "test_s3.py",
    "train/model/test_recompute.py",
    "deploy/test_setup.py",
)
"""Test files that take half a minute or more, or over an hour in `make test-faults` (test_steps.py). They start first,
because each process runs whole files."""


class PrintsAtOnce:
    """Reporter that prints each failure, and the figures that tests record, at once, because a run that is killed
    at a time limit prints no summary."""

    def __init__(self, terminal: "pytest.TerminalReporter") -> None:  # older versions of pytest do not export it
        self.terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.terminal.ensure_newline()
            self.terminal.write_line(f"FAILED {report.nodeid} ({report.when})", red=True)
            self.terminal.write_line("\n".join(report.longreprtext.splitlines()[-25:]))
        elif report.when == "call":
            for name, value in report.user_properties:
                self.terminal.ensure_newline()
                self.terminal.write_line(f"{report.nodeid}: {name}: {json.dumps(value, ensure_ascii=False)}")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Register the fixtures in processes that run tests, and the reporter in the main process, because xdist's workers
    have no terminal. With workers, the main process runs no tests, so it starts them without importing torch first."""
    is_worker = hasattr(config, "workerinput")
    if is_worker or not config.getoption("numprocesses", None):
        gc.disable()  # until all tests are collected: garbage collection would take a fifth of that time
        config.pluginmanager.import_plugin(FIXTURES)
    if not is_worker:
        config.pluginmanager.register(PrintsAtOnce(config.pluginmanager.getplugin("terminalreporter")))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move the long files to the front, and keep the order of the others."""
    place = {Path(__file__).parent / name: i for i, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))


def pytest_collection_finish() -> None:
    """Enable garbage collection again, and prepare the processes that tests start. Collections exempt all imported
    modules and are rarer than by default, because they would take several per cent of the tests' time."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)
    gc.enable()
    if ranks := sys.modules.get("tests.ranks"):
        ranks.fork_server()


def pytest_sessionfinish() -> None:
    """Let the interpreter free everything at its exit; otherwise libraries report leaks."""
    gc.unfreeze()
