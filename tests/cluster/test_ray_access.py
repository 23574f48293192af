"""Authentication, on a real head node that is started as docs/how-to/cluster.md says."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks import free_port
from tests.roots import precompute_arguments
from tests.runs import PYTHON, environment, run_module

pytestmark = pytest.mark.slow

RAY = str(Path(sys.executable).with_name("ray"))
REPOSITORY = Path(__file__).parents[3]


class Head:
    """A head node with a dashboard on localhost, each in its own session."""

    def __init__(self, folder: Path):
        self.token = folder / "token"
        self.token.write_text("0123456789abcdef" * 4)
        self.port, self.dashboard = free_port(), free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.allowed = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.token)}
        flags = ["--head", "--node-ip-address", "127.0.0.1", "--port", str(self.port), "--num-cpus", "2"]
        flags += ["--include-dashboard", "true", "--dashboard-host", "127.0.0.1"]
        flags += ["--dashboard-port", str(self.dashboard), "--temp-dir", str(folder / "ray"), "--block"]
        flags += ["--dashboard-agent-listen-port", str(free_port())]
        self.process = subprocess.Popen(
            [RAY, "start", *flags],
            env=environment(**self.allowed),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def ray(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Start a `ray` command in a separate process."""
        env = environment(**variables) | {"PYTHONPATH": str(REPOSITORY)}
        return subprocess.run([RAY, *arguments], capture_output=True, text=True, env=env, timeout=500)

    def stop(self) -> None:
        """Stop the node; with `--block`, its processes end with the command."""
        self.process.terminate()
        self.process.wait(60)


@pytest.fixture
def head() -> Iterator[Head]:
    """A running head node, reachable with its token. Its folder's name is short, because socket paths are limited."""
    with tempfile.TemporaryDirectory(prefix="lm-", ignore_cleanup_errors=True) as folder:
        head = Head(Path(folder))
        try:
            end = time.monotonic() + 240
            while head.ray("job", "list", "--address", f"http://127.0.0.1:{head.dashboard}", **head.allowed).returncode:
                assert head.process.poll() is None and time.monotonic() < end, "the head node did not start"
                time.sleep(2)
            yield head
        finally:
            head.stop()


def test_a_job_needs_the_token(head: Head, models: Path, tars: Path, tmp_path: Path) -> None:
    arguments = precompute_arguments(models, tars, tmp_path / "root")
    dashboard = f"http://127.0.0.1:{head.dashboard}"

    no_token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "absent")}
    (tmp_path / "wrong").write_text("f" * 64)
    wrong_token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "wrong")}
    for variables in (no_token, wrong_token):
        result = run_module(
            "precompute", *arguments, launcher=PYTHON, variables={"RAY_ADDRESS": head.address, **variables}
        )
        assert result.returncode == 2, result.stderr
        error = result.stderr.replace("\n", " ")
        assert f"error: The Ray cluster at RAY_ADDRESS={head.address} cannot be joined" in error
        assert "set RAY_AUTH_MODE=token on this machine and put the same token in" in error and "Traceback" not in error
        assert head.ray("job", "list", "--address", dashboard, **variables).returncode != 0
    assert not (tmp_path / "root").exists()

    result = run_module(
        "precompute", *arguments, launcher=PYTHON, variables={"RAY_ADDRESS": head.address, **head.allowed}
    )
    assert result.returncode == 0 and "Tars: 2 encoded" in result.stdout, result.stderr


def test_a_local_start_uses_a_token(tmp_path: Path) -> None:
    """`ray.init` enables token authentication, and a client without the token is refused."""
    start = (
        "import ray; from cluster.nodes import ResourcesConfig; from cluster.start import start_ray; "
        "start_ray(ResourcesConfig(num_gpus=0, num_cpus=1)); import os; "
        "print(os.environ.get('RAY_AUTH_MODE'), ray.get_runtime_context().gcs_address, flush=True); input()"
    )
    variables = environment(RAY_AUTH_TOKEN_PATH=str(tmp_path / "token"))
    (tmp_path / "token").write_text("0123456789abcdef" * 4)
    variables.pop("RAY_AUTH_MODE", None)
    server = subprocess.Popen(
        [sys.executable, "-c", start], env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        mode, address = server.stdout.readline().split()
        assert mode == "token"
        join = "import ray, sys; ray.init(sys.argv[1], log_to_driver=False); print(len(ray.nodes()))"
        for path, joins in (("token", True), ("wrong", False)):
            (tmp_path / "wrong").write_text("f" * 64)
            env = environment(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(tmp_path / path))
            client = [sys.executable, "-c", join, address]
            result = subprocess.run(client, env=env, capture_output=True, text=True, timeout=200)
            assert (result.returncode == 0) == joins, result.stderr
        none = environment(RAY_AUTH_MODE="disabled")
        assert subprocess.run(client, env=none, capture_output=True, text=True, timeout=200).returncode != 0
    finally:
        server.communicate("\n", timeout=60)
