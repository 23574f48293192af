"""Real runs with faults, under a real Prometheus: each of stage 2's alerts fires, names the rank, and clears."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from moto.server import ThreadedMotoServer

from tests import ranks
from tests.faults.prometheus import STAGE_2, Prometheus, wait_until
from tests.runs import UNET, environment, launcher, rank_processes, train_fields, write_config
from train.__main__ import run as command
from train.step import StepResult, TrainStep

pytestmark = [pytest.mark.slow, pytest.mark.prometheus]
SHORTER = {r"\[(15|30)m\]": "[20s]", "offset 15m": "offset 20s", "(?m)> 60$": "> 8", "> 240 and": "> 8 and"}
FOREVER = 1_000_000
SLEPT, LOADED, AWAY = (
    ("LatentmillTrainRankSilent", "LatentmillTrainRankBehind", "LatentmillTrainStalled"),
    ("LatentmillTrainRankLoads",),
    ("LatentmillTrainCheckpointOld",),
)
NUMBERS = ("LatentmillTrainNotFinite", "LatentmillTrainLossSpike")


def fields(latents: Path, run_dir: Path | str, port: int, **changes: Any) -> dict[str, Any]:
    """Return the config of an endless run with a metrics endpoint."""
    log = {"metrics_at": f"127.0.0.1:{port}", "every": 5, "samples": False}
    changes = {"log": log, "max_steps": FOREVER} | changes
    return train_fields(latents, run_dir, UNET, **changes)


def steps(prometheus: Prometheus) -> float:
    """Return the number of steps that the run has done."""
    found = prometheus.query("latentmill_train_step")
    return float(found[0]["value"][1]) if found else 0


@contextmanager
def stopped(processes: list[psutil.Process]) -> Iterator[None]:
    """Suspend these processes within the context."""
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            process.resume()


def test_every_rule_is_here() -> None:
    assert {*SLEPT, *LOADED, *AWAY, *NUMBERS} == {rule["alert"] for rule in STAGE_2["rules"]}


def test_two_ranks_that_stop_wait_for_data_and_cannot_save(latents: Path, s3: str, tmp_path: Path) -> None:
    """Run the unmodified `python -m train`; stop its loader, then a rank, then the store that it saves to."""
    assert shutil.which("prometheus"), "apt-get install prometheus"
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)  # serves the same buckets; its port comes and goes
    server.start()
    host, port_of_store = server.get_host_and_port()
    port = ranks.free_port()
    config = fields(latents, f"{s3}/run", port, data={"num_workers": 1}, checkpoint={"every": 50, "keep": 1})
    path = tmp_path / "run.yaml"
    write_config(tmp_path, config).rename(path)
    variables = environment(AWS_ENDPOINT_URL=f"http://{host}:{port_of_store}", AWS_MAX_ATTEMPTS="1")
    with (tmp_path / "log").open("wb") as log:
        run = subprocess.Popen(
            [*launcher(2), "-m", "train", "--config", str(path)], stdout=log, stderr=log, env=variables
        )
    try:
        with Prometheus(tmp_path / "prometheus", f"127.0.0.1:{port}", SHORTER) as prometheus:
            wait_until(lambda: steps(prometheus) > 100, "the run does not begin")
            rank = next(each for each in rank_processes(run.pid) if each.environ()["RANK"] == "1")
            assert rank.children()
            with stopped(rank.children()):
                prometheus.await_alert("LatentmillTrainRankLoads", rank="1")
                prometheus.await_alert("LatentmillTrainRankBehind", rank="1")
                assert not prometheus.fires("LatentmillTrainRankBehind", rank="0")
                assert not prometheus.fired("LatentmillTrainRankSilent")  # it lives
            prometheus.await_silence(*SLEPT, *LOADED)
            with stopped([rank]):
                prometheus.await_alert("LatentmillTrainRankSilent", rank="1")
                prometheus.await_alert("LatentmillTrainRankBehind", rank="1")
                prometheus.await_alert("LatentmillTrainStalled")
                assert not prometheus.fires("LatentmillTrainRankSilent", rank="0")
            prometheus.await_silence(*SLEPT)
            assert not prometheus.fired("LatentmillTrainCheckpointOld")
            server.stop()
            prometheus.await_alert("LatentmillTrainCheckpointOld")
            server = ThreadedMotoServer(ip_address=host, port=port_of_store)
            server.start()
            prometheus.await_silence(*SLEPT, *AWAY, *LOADED)
            assert not any(map(prometheus.fired, NUMBERS))
        run.terminate()
        assert run.wait(120) == 75, (tmp_path / "log").read_text()[-3000:]
    finally:
        run.kill()
        server.stop()


def ailing(arguments: list[str]) -> None:
    """Run a trainer whose last weights are scaled by a thousand or infinity in a step when a file requests it."""
    folder, train_step = Path(arguments[0]), TrainStep.__call__

    def ill(self: TrainStep, batch: Any, step: int) -> StepResult:
        factor = next((float(path.name) for path in folder.iterdir()), 1.0)
        weight = self.network.conv_out.weight
        whole = weight.data.clone()
        weight.data.mul_(factor)
        result = train_step(self, batch, step)
        if factor != 1.0:
            weight.data.copy_(whole)
            (folder / f"{factor:g}").unlink()
        return result

    TrainStep.__call__ = ill  # type: ignore[method-assign]
    command(arguments[1:])


def test_a_loss_that_leaps_and_one_that_is_not_finite(latents: Path, tmp_path: Path) -> None:
    assert shutil.which("prometheus"), "apt-get install prometheus"
    port, faults = ranks.free_port(), tmp_path / "faults"
    faults.mkdir()
    alarm = {"window": 10, "threshold": 100.0}
    path = write_config(tmp_path, fields(latents, tmp_path / "run", port, checkpoint={"every": FOREVER}, alarm=alarm))
    program = f"{ailing.__module__}:{ailing.__name__}"
    (run,) = ranks.start(tmp_path / "log", [str(faults), "--config", str(path)], program=program)
    try:
        with Prometheus(tmp_path / "prometheus", f"127.0.0.1:{port}", SHORTER) as prometheus:
            wait_until(lambda: steps(prometheus) > 20, "the run does not begin")
            for factor, alert in (("1000", "LatentmillTrainLossSpike"), ("inf", "LatentmillTrainNotFinite")):
                assert not prometheus.fired(alert)
                (faults / factor).touch()
                prometheus.await_alert(alert)
                assert not (faults / factor).exists()
                prometheus.await_silence(alert)
            assert not any(map(prometheus.fired, (*SLEPT, *AWAY)))
    finally:
        assert run.pid is not None
        os.killpg(run.pid, signal.SIGKILL)
        run.join()
