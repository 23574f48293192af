"""FSDP2 on gloo: losses, checkpoints and skipped steps are the same as without, and checkpoints interchangeable."""

import json
import os
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from diffusers import PixArtTransformer2DModel, UNet2DConditionModel
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as fsdp_collectives

from shards.base.errors import RequestError
from tests import ranks
from tests.runs import TRANSFORMER, UNET, column, curve, train_fields, write_config
from train.__main__ import run as command
from train.data.batch import Batch
from train.data.draws import Draws
from train.model.sharding import shard_weights
from train.model.tensors import load_tensors
from train.objective.loss import DiffusionLoss, NoisyBatch
from train.run.checkpoints.checkpoint import step_folder, verify_checkpoint
from train.run.health.heartbeat import HeartbeatReporter
from train.run.processes import set_collective_timeout

pytestmark = pytest.mark.heavy

STEPS = 4
FILES = ("unet/diffusion_pytorch_model.safetensors", "ema/diffusion_pytorch_model.safetensors", "optimizer.safetensors")


def train(folder: Path, latents: Path, network: Path, name: str, num_processes: int, **changes: Any) -> Path:
    """Train a run with checkpoints after step 2 and at the end, and return its folder."""
    defaults = {"max_steps": STEPS, "checkpoint": {"every": 2, "keep": 9}, "collective_timeout": 120.0}
    fields = train_fields(latents, folder / name, network, **defaults | {"microbatch_size": 2} | changes)
    log, arguments = folder / f"{name}.log", [str(folder / "calls"), "--config", str(write_config(folder, fields))]
    program = "tests.train.model.test_sharding:count_averages"
    processes = ranks.start(log, arguments, num_processes, program=program)
    assert ranks.wait(processes) == [0] * num_processes, log.read_text()
    return folder / name


@pytest.fixture(scope="module", params=[TRANSFORMER, pytest.param(UNET, marks=pytest.mark.slow)], ids=lambda p: p.stem)
def network(request: pytest.FixtureRequest) -> Path:
    """Config of the network that is trained."""
    return request.param


@pytest.fixture(scope="module")
def whole(network: Path, latents: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two processes without sharding."""
    return train(tmp_path_factory.mktemp("whole"), latents, network, "whole", 2)


@pytest.fixture(scope="module")
def full(network: Path, latents: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two processes with sharded weights, which validates between steps."""
    validation = {"root": str(latents), "bucket": "64x64", "samples": 10, "batch_size": 4, "every": 2}
    folder = tmp_path_factory.mktemp("full")
    return train(folder, latents, network, "full", 2, sharding="full", validation=validation)


def same_weights(one: Path, other: Path, step: int) -> None:
    """Assert that two checkpoints have the same tensors up to rounding."""
    for name in FILES:
        a, b = (load_tensors(step_folder(run, step) / name) for run in (one, other))
        assert {key: (value.shape, value.dtype) for key, value in a.items()} == {
            key: (value.shape, value.dtype) for key, value in b.items()
        }
        for key, value in a.items():
            torch.testing.assert_close(value, b[key], rtol=1e-3, atol=1e-6)
    configs = [(step_folder(run, step) / "unet" / "config.json").read_bytes() for run in (one, other)]
    assert configs[0] == configs[1]


def test_full_sharding_gives_the_curve_the_norms_and_the_checkpoints_of_ddp(
    network: Path, whole: Path, full: Path
) -> None:
    assert curve(full)[1] == curve(whole)[1]
    assert curve(full)[0] == pytest.approx(curve(whole)[0], rel=1e-5)
    assert column(full, "grad_norm") == pytest.approx(
        column(whole, "grad_norm"), rel=1e-4
    )  # the norm is over all shards
    same_weights(whole, full, STEPS)
    # each process wrote one file, in a layout that diffusers can load
    files = set(verify_checkpoint(step_folder(full, STEPS)).content["files"])
    parts = {f"{name[:-12]}-0000{number}-of-00002.safetensors" for name in FILES for number in (1, 2)}
    assert files == parts | {f"{name}.index.json" for name in FILES} | {"unet/config.json", "ema/config.json"}
    kind = UNet2DConditionModel if network == UNET else PixArtTransformer2DModel
    loaded = kind.from_pretrained(step_folder(full, STEPS) / "unet").state_dict()
    saved = load_tensors(step_folder(full, STEPS) / FILES[0])
    assert saved.keys() == loaded.keys() and all(torch.equal(saved[name], loaded[name]) for name in saved)


def test_grad_op_gives_the_curve_and_the_checkpoints_of_ddp(
    network: Path, whole: Path, latents: Path, tmp_path: Path
) -> None:
    # weights that stayed gathered after the validation could not be swapped with the sharded average
    validation = {"root": str(latents), "bucket": "64x64", "samples": 4, "batch_size": 4, "every": 2, "weights": "ema"}
    changes = {"sharding": "grad_op", "max_steps": 2, "validation": validation}
    grad_op = train(tmp_path, latents, network, "grad_op", 2, **changes)
    assert curve(grad_op)[0] == pytest.approx(curve(whole)[0][:2], rel=1e-5)
    same_weights(whole, grad_op, 2)


def test_groups_of_processes_give_the_curve_and_the_checkpoints_of_ddp(
    network: Path, whole: Path, latents: Path, tmp_path: Path
) -> None:
    """Resume an unsharded run in two groups of two processes (HSDP), with two microbatches per step and validation of
    the average, and resume the result on one process. Each step averages gradients across groups only once."""
    copy_of_step_2(whole, tmp_path / "groups")
    validation = {"root": str(latents), "bucket": "64x64", "samples": 4, "batch_size": 4, "every": 1, "weights": "ema"}
    layout = {"sharding": "full", "sharding_group": 2, "microbatch_size": 1}
    groups = train(tmp_path, latents, network, "groups", 4, **layout, validation=validation, max_steps=3)
    assert column(groups, "loss") == pytest.approx(column(whole, "loss")[2:3], rel=1e-5)
    assert column(groups, "grad_norm") == pytest.approx(column(whole, "grad_norm")[2:3], rel=1e-4)
    averaged = [json.loads(path.read_text())["2"] for path in tmp_path.glob("calls.*")]
    assert len(averaged) == 4
    count = sum(tensor.numel() for tensor in load_tensors(step_folder(groups, 3) / FILES[0]).values())
    # a process averages its half of the weights, which is padded to the size of the other half
    assert all(count / 2 <= each < 0.6 * count for each in averaged)
    resumed = train(tmp_path, latents, network, "groups", 1)
    assert column(resumed, "loss") == pytest.approx(column(whole, "loss")[2:], rel=1e-5)
    same_weights(whole, resumed, STEPS)


@pytest.mark.parametrize(
    ("sharding", "num_processes", "group"),
    [("none", 2, 0), pytest.param("full", 2, 2, marks=pytest.mark.slow), ("full", 4, 2)],
)
def test_weights_are_built_by_one_process_and_sent_to_the_others(
    sharding: str, num_processes: int, group: int, tmp_path: Path
) -> None:
    """All ranks start with the bits of an unsharded start, including a buffer that no checkpoint contains, and only the
    main process ever holds all weights."""
    fields = {
        "_class_name": "PixArtTransformer2DModel",
        "num_attention_heads": 6,
        "attention_head_dim": 64,
        "cross_attention_dim": 384,
        "caption_channels": 64,
        "num_layers": 16,
        "sample_size": 16,
        "in_channels": 4,
        "out_channels": 4,
        "use_additional_conditions": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    arguments = [sharding, str(group), str(tmp_path / "config.json"), str(tmp_path)]
    program = "tests.train.model.sending_ranks:send"
    processes = ranks.start(tmp_path / "log", arguments, num_processes, program=program)
    assert ranks.wait(processes, 300) == [0] * num_processes, (tmp_path / "log").read_text()
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(num_processes)]
    assert all(each["same"] and each["trainable"] for each in found)
    imports = 48 * 2**20
    assert imports < found[0]["all"] / 3
    assert found[0]["peak"] < found[0]["all"] + imports  # it frees what it has sent
    for each in found[1:]:
        assert each["share"] < 1.1 * each["all"] / (group or 1)
        assert each["peak"] < each["share"] + imports


def test_groups_wait_as_long_as_the_run(tmp_path: Path) -> None:
    """torch creates groups with its own timeout."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
        heartbeat = SimpleNamespace(timeout=0.0, store=object())
        set_collective_timeout(cast(HeartbeatReporter, heartbeat), 77.0, mesh.get_all_groups())
        found = [group._get_backend(torch.device("cpu")).options._timeout for group in mesh.get_all_groups()]
    finally:
        dist.destroy_process_group()
    assert found == [timedelta(seconds=77)] * 2


def test_a_group_that_does_not_divide_the_processes_is_refused(latents: Path, tmp_path: Path) -> None:
    fields = train_fields(latents, tmp_path / "run", sharding="full", sharding_group=3)
    with pytest.raises(RequestError, match="sharding_group 3 does not divide the number of processes \\(8\\)"):
        command(["check", "--config", str(write_config(tmp_path, fields)), "--num_processes", "8"])


def count_averages(arguments: list[str]) -> None:
    """The trainer; the number of elements that it all-reduces, by size of the group, is written to a file."""
    all_reduce: Any = dist.all_reduce
    calls = Counter[int]()

    def counted(tensor: Tensor, *others: Any, group: Any = None, **named: Any) -> Any:
        calls[dist.get_world_size(group)] += tensor.numel()
        return all_reduce(tensor, *others, group=group, **named)

    path, *rest = arguments
    with patch.object(fsdp_collectives, "dist", SimpleNamespace(**vars(dist) | {"all_reduce": counted})):
        command(rest)
    Path(f"{path}.{os.getpid()}").write_text(json.dumps(calls))


def copy_of_step_2(run: Path, target: Path) -> None:
    """Make a run folder with hard links to that one checkpoint."""
    source = step_folder(run, 2)
    for path in source.rglob("*"):
        if path.is_file():
            link = step_folder(target, 2) / path.relative_to(source)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.hardlink_to(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "num_processes", "sharding"),
    [("full", 1, "none"), ("whole", 2, "full")],
    ids=["parts-to-one-process", "whole-to-parts"],
)
def test_a_run_goes_on_with_another_sharding(
    request: pytest.FixtureRequest,
    network: Path,
    whole: Path,
    latents: Path,
    tmp_path: Path,
    source: str,
    num_processes: int,
    sharding: str,
) -> None:
    """A checkpoint survives loading and saving, apart from two steps of training. In `make test`, a run goes on in
    groups of processes, and from them on one."""
    copy_of_step_2(request.getfixturevalue(source), tmp_path / "run")
    resumed = train(tmp_path, latents, network, "run", num_processes, sharding=sharding)
    assert column(resumed, "step") == [3, 4]
    assert column(resumed, "loss") == pytest.approx(column(whole, "loss")[2:], rel=1e-5)
    same_weights(whole, resumed, STEPS)


def blow_up(arguments: list[str]) -> None:
    """The trainer, with latents of infinite size on step 3 alone."""
    add_noise = DiffusionLoss.add_noise

    def sometimes(self: DiffusionLoss, batch: Batch, draws: Draws) -> NoisyBatch:
        noisy = add_noise(self, batch, draws)
        planted = draws.step == 2 and int(draws.slots[0]) == 1
        return replace(noisy, latents=noisy.latents * float("inf")) if planted else noisy

    DiffusionLoss.add_noise = sometimes  # type: ignore[method-assign]
    command(arguments)


def test_a_step_that_is_not_finite_on_one_process_is_skipped_by_both(latents: Path, tmp_path: Path) -> None:
    fields = train_fields(
        latents, tmp_path / "run", max_steps=4, sharding="full", checkpoint={"every": 1, "keep": 9}, microbatch_size=2
    )
    arguments = ["--config", str(write_config(tmp_path, fields))]
    codes = ranks.wait(ranks.start(tmp_path / "log", arguments, 2, program="tests.train.model.test_sharding:blow_up"))
    assert codes == [0, 0], (tmp_path / "log").read_text()
    for part in ("optimizer-00001-of-00002.safetensors", f"{FILES[0][:-12]}-00002-of-00002.safetensors"):
        hashes = [verify_checkpoint(step_folder(tmp_path / "run", step)).content["files"][part] for step in (2, 3, 4)]
        assert hashes[0] == hashes[1] != hashes[2]
    assert column(tmp_path / "run", "skipped_steps") == [0, 0, 1, 1]
    assert column(tmp_path / "run", "loss")[3] is not None


class Timesteps(nn.Module):
    """A network that records the data types of its timesteps and of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, timesteps: Tensor) -> Tensor:
        self.seen = timesteps.dtype, self.weight.dtype
        return timesteps * self.weight.sum()


def test_sharding_rounds_weights_but_not_timesteps_to_bfloat16(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        shard_weights(network := Timesteps(), "full", "bfloat16")
        network(torch.tensor([999.5]))
    finally:
        dist.destroy_process_group()
    assert network.seen == (torch.float32, torch.bfloat16)


def test_fsdp_from_the_launcher_is_refused(latents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    config = write_config(tmp_path, train_fields(latents, tmp_path / "run"))
    with pytest.raises(RequestError, match=r"The launcher requests FSDP.* set `--sharding full`"):
        command(["--config", str(config)])
    assert not (tmp_path / "run").exists()
