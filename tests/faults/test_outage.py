"""A store that becomes unavailable during a real job and comes back: the job pauses, and no attempt is counted."""

import json
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest
from moto.server import ThreadedMotoServer as Server

from shards.open import open_store
from shards.root.committed import list_commits
from shards.tools.verify import verify_root
from tests.fixtures import SIZES
from tests.roots import precompute_arguments
from tests.runs import environment, wait_until
from tests.tiny import make_samples, make_tar

NUM_TARS = 5
ONCE = ("--workers.attempts", "1", "--workers.lost_attempts", "1", "--workers.max_in_flight", "2")


def start_job(models: Path, s3: str, root: Path | str, folder: Path) -> tuple[subprocess.Popen[bytes], Path, Server]:
    """Start a job with tars in S3. Return it, its log, and its server, which serves the same buckets as `s3` on a port
    that can be closed."""
    for tar in range(NUM_TARS):
        make_tar(folder / "tars", f"{tar:05d}", make_samples(tar, 40, SIZES))
    fsspec.filesystem("s3").put(f"{folder / 'tars'}/", f"{s3}/tars/", recursive=True)
    server = Server(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    arguments = precompute_arguments(models, folder / "tars", folder / "root", "--input", f"{s3}/tars", *ONCE)
    variables = environment(AWS_ENDPOINT_URL=f"http://{host}:{port}", AWS_MAX_ATTEMPTS="1")
    log = folder / "log"
    with log.open("wb") as file:
        command = [sys.executable, "-m", "precompute", *arguments, "--output", str(root)]
        return subprocess.Popen(command, stdout=file, stderr=file, env=variables), log, server


def lose_store(job: subprocess.Popen[bytes], log: Path, server: Server, root: Path | str) -> None:
    """Once the job has committed a tar, close its server, and wait until the job pauses."""
    wait_until(lambda: list_commits(open_store(root)), process=job, log=log)
    server.stop()
    wait_until(lambda: " s and will retry in 10 s" in log.read_text(), process=job, log=log)


@pytest.mark.slow
def test_a_job_stopped_while_its_root_is_away_ends_as_stopped(models: Path, s3: str, tmp_path: Path) -> None:
    """Schedulers requeue a job that ends with code 75."""
    job, log, server = start_job(models, s3, f"{s3}/root", tmp_path)
    try:
        lose_store(job, log, server, f"{s3}/root")
        job.terminate()
        job.wait(240)
    finally:
        job.kill()
        server.stop()
    assert job.returncode == 75, log.read_text()
    assert "warning: the root's index cannot be read" in log.read_text()
    assert "Stopped by a signal. Tars remaining: " in log.read_text()


@pytest.mark.slow
def test_a_store_goes_away_and_comes_back(models: Path, s3: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    job, log, server = start_job(models, s3, root, tmp_path)
    host, port = server.get_host_and_port()
    try:
        lose_store(job, log, server, root)
        assert "Check the URL, the credentials and the network" in log.read_text()
        server = Server(ip_address=host, port=port)
        server.start()
        job.wait(240)
    finally:
        job.kill()
        server.stop()
    assert job.returncode == 0, log.read_text()
    assert "The outage is over. The job is resuming after a pause of" in log.read_text()
    assert f"Tars: {NUM_TARS} encoded" in log.read_text() and "0 failed" in log.read_text()
    assert list(verify_root(open_store(root))) == []
    failures = [json.loads(line) for line in (tmp_path / "root.failures.jsonl").read_text().splitlines()]
    assert failures and all(line["attempts"] == 1 and not line["final"] for line in failures)
    assert all(line["outcome"] == "an attempt failed because of an outage and is not counted" for line in failures)
    assert all(
        "encode_on_worker" in line["trace"] and "cannot be read or written" in line["cause"] for line in failures
    )
