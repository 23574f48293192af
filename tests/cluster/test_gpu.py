"""A GPU that torch cannot use is an error with a remedy, rather than a silent run on the CPU."""

import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayTaskError

from cluster.actor import WorkerActor
from cluster.nodes import ResourcesConfig
from cluster.start import precision_on_worker, start_ray
from shards.base.device import choose_device
from shards.base.errors import RequestError
from tests.runs import train_fields
from train.config import TrainConfig
from train.start import train_here

MESSAGE = r"This machine has an NVIDIA GPU, but torch .* cannot use it .*pass `--device cpu` to training"


@pytest.fixture
def unusable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this machine appear to have a GPU that torch cannot use."""
    (tmp_path / "nvidia0").touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("shards.base.device.has_accelerator", lambda: False)
    for module in ("cluster.start", "cluster.actor", "train.start"):
        monkeypatch.setattr(f"{module}.choose_device", partial(choose_device, devices=tmp_path))


@pytest.mark.usefixtures("unusable")
def test_a_job_on_this_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.init", lambda **_: pytest.fail("Ray was started"))
    with pytest.raises(RequestError, match=MESSAGE):
        start_ray(ResourcesConfig(num_gpus=1))


@pytest.mark.usefixtures("unusable")
def test_auto_is_not_resolved_on_such_a_node_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be float32, which a root keeps for good."""

    class Task:
        def __init__(self, function: Callable[..., object]):
            self.function = function

        def remote(self, *given: object) -> RayTaskError | None:
            try:
                self.function(*given)
            except RequestError as error:
                return RayTaskError("_resolve", traceback.format_exc(), error)
            return None

    def get(ended: RayTaskError | None, timeout: float) -> object:
        if ended is not None:
            raise ended.as_instanceof_cause()
        return "float32", []

    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr("cluster.start.start_ray", lambda config: None)
    monkeypatch.setattr("ray.remote", lambda **_: Task)
    monkeypatch.setattr("ray.get", get)
    with pytest.raises(RequestError, match=rf"^Node [\d.]+: {MESSAGE}"):
        precision_on_worker("auto", ResourcesConfig(num_gpus=1))


@pytest.mark.usefixtures("unusable")
def test_an_attempt_on_such_a_node_of_a_cluster_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.get_gpu_ids", lambda: [0])
    board: Any = None

    def begun(*_: object) -> str:
        pytest.fail("the attempt began")

    worker = WorkerActor[str, str](begun, board)
    with pytest.raises(RequestError, match=MESSAGE):
        worker.attempt(begun, "00000", "work", 1)


@pytest.mark.usefixtures("unusable")
def test_training_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.start.die_with_launcher", lambda: None)  # this process has none
    config = TrainConfig.model_validate(train_fields(tmp_path / "latents", tmp_path / "run"))
    with pytest.raises(RequestError, match=MESSAGE):
        train_here(config, None)
