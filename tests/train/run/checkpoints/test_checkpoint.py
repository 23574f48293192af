"""Checkpoints written in the background: apart from the run, one at a time, and no failure goes unheard."""

import errno
import resource
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from torch.distributed import HashStore

from shards.base.durable import read_json
from shards.base.errors import RequestError, WorkError
from tests import ranks
from tests.runs import TRANSFORMER, UNET, acquire, curve, train_fields, train_run, write_config
from train.__main__ import run as command
from train.model.config import EmaConfig
from train.model.ema import make_averages
from train.model.network import build_network
from train.run.checkpoints import writer as checkpoint
from train.run.checkpoints.checkpoint import (
    list_checkpoints,
    load_weights,
    newest_checkpoint,
    restore,
    step_folder,
    step_of,
    verify_checkpoint,
)
from train.run.checkpoints.retention import CheckpointConfig, superfluous
from train.run.checkpoints.snapshot import Snapshot, take_snapshot
from train.run.checkpoints.writer import SINGLE, CheckpointWriter, WriterGroup, warn_if_slow_to_stop
from train.run.lease.owner import Pace
from train.run.state import TrainState


@pytest.fixture
def unet() -> UNet2DConditionModel:
    return build_network(UNET, seed=0)


def writer(folder: Path, unet: UNet2DConditionModel, group: WriterGroup = SINGLE, **fields: Any) -> CheckpointWriter:
    config = CheckpointConfig(asynchronous=True, **fields)
    return CheckpointWriter(folder, acquire(folder), unet.to_json_string(), {"seed": 0}, config, group)


def snapshot(unet: UNet2DConditionModel, step: int) -> Snapshot:
    return take_snapshot(TrainState(step=step), unet, torch.optim.AdamW(unet.parameters()), make_averages(EmaConfig()))


def test_the_run_may_go_on_while_it_is_written(
    unet: UNet2DConditionModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held up before its first file: nothing is there; then what is written is what was, not what has become of it."""
    go_on = threading.Event()
    write = checkpoint.write_tensors
    monkeypatch.setattr(checkpoint, "write_tensors", lambda *a: (go_on.wait(60), write(*a))[1])
    writing = writer(tmp_path, unet)
    before = {name: value.clone() for name, value in unet.state_dict().items()}
    writing.write(snapshot(unet, 1))
    with torch.no_grad():
        for parameter in unet.parameters():
            parameter.add_(1.0)
    writing.check()
    assert not list_checkpoints(tmp_path)
    go_on.set()
    writing.finish()
    (folder,) = list_checkpoints(tmp_path)
    verify_checkpoint(folder)
    saved = UNet2DConditionModel.from_pretrained(folder / "unet").state_dict()
    assert all(torch.equal(saved[name], value) for name, value in before.items())


def test_at_most_one_is_being_written(
    unet: UNet2DConditionModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    active, most = [], []
    write = checkpoint.write_tensors

    def counted(*arguments: Any) -> str:
        active.append(1)
        most.append(len(active))
        sha256 = write(*arguments)
        active.pop()
        return sha256

    monkeypatch.setattr(checkpoint, "write_tensors", counted)
    writing = writer(tmp_path, unet, keep=2)
    for step in range(1, 6):
        writing.write(snapshot(unet, step))
    writing.finish()
    assert max(most) == 1
    assert [folder.name for folder in list_checkpoints(tmp_path)] == ["step-00000004", "step-00000005"]


def test_the_newest_stay_and_every_so_many_for_good(unet: UNet2DConditionModel, tmp_path: Path) -> None:
    writing = writer(tmp_path, unet, keep=2, keep_every=3)
    kept = []
    for step in range(1, 9):
        writing.write(snapshot(unet, step))
        writing.finish()
        kept.append([int(folder.name.removeprefix("step-")) for folder in list_checkpoints(tmp_path)])
    assert kept == [[1], [1, 2], [2, 3], [3, 4], [3, 4, 5], [3, 5, 6], [3, 6, 7], [3, 6, 7, 8]]


def test_an_old_one_that_cannot_be_removed_is_kept_until_the_next_save(
    unet: UNet2DConditionModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    writing, steps, replace = writer(tmp_path, unet, keep=1), iter(range(1, 5)), Path.replace

    def save() -> list[int]:
        writing.write(snapshot(unet, next(steps)))
        writing.finish()
        return [step_of(folder) for folder in list_checkpoints(tmp_path)]

    def forbid(path: Path, target: Path) -> Path:
        if path.name == "step-00000001":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return replace(path, target)

    assert save() == [1]
    monkeypatch.setattr(Path, "replace", forbid)
    assert save() == [1, 2]
    assert "step-00000001 could not be removed completely: " in capsys.readouterr().out
    assert save() == [1, 3]
    monkeypatch.setattr(Path, "replace", replace)
    assert save() == [4]


def test_a_file_that_cannot_grow_is_heard_of_at_the_next_step_and_leaves_the_one_before(
    unet: UNet2DConditionModel, tmp_path: Path
) -> None:
    writing = writer(tmp_path, unet)
    writing.write(snapshot(unet, 1))
    writing.finish()

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        writing.write(snapshot(unet, 2))
        with pytest.raises(
            WorkError, match=r"could not be written: .*File too large.*safetensors.*Earlier checkpoints are intact"
        ):
            while True:
                writing.check()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [folder.name for folder in list_checkpoints(tmp_path)] == ["step-00000001"]
    assert not list(tmp_path.glob("checkpoints/.step-*"))


def test_a_missing_share_is_named(unet: UNet2DConditionModel, tmp_path: Path) -> None:
    writing = writer(tmp_path, unet, WriterGroup(0, 2, HashStore(), timeout=0.1))
    writing.write(snapshot(unet, 1))
    with pytest.raises(WorkError, match=r"process 1 did not write its share within 0\.1 s .* can reach its URL"):
        writing.finish()
    assert not list_checkpoints(tmp_path)


def test_in_the_background_or_not_the_run_is_the_same_and_says_its_phase(
    latents: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Curve, samples, and every byte of the last checkpoint but its state; then the next phase says where it begins."""
    for name, asynchronous in (("at_once", False), ("behind", True)):
        kept = {"every": 2, "keep": 9, "asynchronous": asynchronous, "tag": "phase1"}
        train_run(latents, tmp_path / name, checkpoint=kept)
    assert curve(tmp_path / "at_once") == curve(tmp_path / "behind")
    files = [
        [verify_checkpoint(f).content["files"] for f in list_checkpoints(tmp_path / n)] for n in ("at_once", "behind")
    ]
    assert len(files[0]) == 3 and files[0] == files[1]
    newest = newest_checkpoint(tmp_path / "behind")
    assert newest is not None and newest.tag == "phase1"

    fields = train_fields(latents, tmp_path / "next", max_steps=1, init_from=str(tmp_path / "behind"))
    command(["check", "--config", str(write_config(tmp_path, fields))])
    begins = f"would start from phase1 after step 6 ({tmp_path}/behind/checkpoints/step-00000006/ema)"
    assert f"{tmp_path}/next {begins}" in capsys.readouterr().out


def test_a_loss_scaler_that_finds_its_scale_is_no_skipped_step(latents: Path, tmp_path: Path) -> None:
    """float16 on the CPU: an overflow halves the scale and changes nothing else; it counts only at a scale of 1."""
    fields = train_fields(latents, tmp_path / "run", max_steps=4, checkpoint={"every": 1, "keep": 9})
    arguments = ["--config", str(write_config(tmp_path, fields))]
    codes = ranks.wait(
        ranks.start(tmp_path / "log", arguments, program="tests.train.run.checkpoints.test_checkpoint:with_a_scaler")
    )
    assert codes == [0], (tmp_path / "log").read_text()
    contents = [verify_checkpoint(folder).content for folder in list_checkpoints(tmp_path / "run")]
    assert [content["state"]["scaler"]["scale"] for content in contents] == [4.0, 4.0, 2.0, 1.0]
    assert [content["state"]["skipped"] for content in contents] == [0, 0, 0, 1]
    optimizers = [content["files"]["optimizer.safetensors"] for content in contents]
    assert optimizers[0] != optimizers[1] == optimizers[2] == optimizers[3]


def with_a_scaler(arguments: list[str]) -> None:
    """The trainer with a loss scaler, which accelerate has on GPUs only; losses overflow from the third step on."""
    from accelerate import Accelerator

    from shards.base.config import load_from_args
    from train.config import TrainConfig
    from train.data.batch import Batch
    from train.data.draws import Draws
    from train.objective.loss import DiffusionLoss, NoisyBatch
    from train.prepare import prepare
    from train.setup import build_trainer
    from train.start import acquire

    add_noise = DiffusionLoss.add_noise

    def overflowing(self: DiffusionLoss, batch: Batch, draws: Draws) -> NoisyBatch:
        found = add_noise(self, batch, draws)
        return replace(found, target=found.target * (float("inf") if draws.step >= 2 else 1.0))

    DiffusionLoss.add_noise = overflowing  # type: ignore[method-assign]
    config = load_from_args(TrainConfig, arguments, "train", None)
    accelerator = Accelerator(cpu=True)
    accelerator.native_amp = True
    accelerator.state._mixed_precision = "fp16"
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    prepared = prepare(config, accelerator)
    build_trainer(config, prepared, accelerator, acquire(config, prepared)).fit()


def test_what_else_lies_among_checkpoints_is_left_alone(unet: UNet2DConditionModel, tmp_path: Path) -> None:
    writing = writer(tmp_path, unet, keep=1)
    writing.write(snapshot(unet, 1))
    writing.finish()
    shutil.copytree(step_folder(tmp_path, 1), tmp_path / "checkpoints" / "step-00000001.bak")
    (tmp_path / "checkpoints" / "step-00000009.tar").write_bytes(b"")
    writing.write(snapshot(unet, 2))
    writing.finish()
    assert [folder.name for folder in list_checkpoints(tmp_path)] == ["step-00000002"]
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {
        "step-00000001.bak", "step-00000002", "step-00000009.tar",
    }  # fmt: skip
    found = newest_checkpoint(tmp_path)
    assert found is not None and found.folder.name == "step-00000002"


def test_a_copy_of_a_run_at_a_url_does_not_start_over(tmp_path: Path) -> None:
    for name in ("step-00000002.0001", "step-00000002.0003"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    with pytest.raises(RequestError, match=r"was copied from a URL, .*`mv \S+2\.0003 \S+step-00000002`"):
        newest_checkpoint(tmp_path)


@pytest.mark.parametrize("field", [{"attention_head_dim": 2}, {"act_fn": "gelu"}])
def test_weights_of_another_architecture_of_equal_shapes_are_refused(
    unet: UNet2DConditionModel, tmp_path: Path, field: dict[str, Any]
) -> None:
    writing = writer(tmp_path, unet)
    writing.write(snapshot(unet, 1))
    writing.finish()
    other = UNet2DConditionModel.from_config({**read_json(UNET), **field})
    assert all(a.shape == b.shape for a, b in zip(unet.parameters(), other.parameters(), strict=True))
    (name,) = field
    with pytest.raises(RequestError, match=f"has a different architecture from `backbone.config`: {name}"):
        load_weights(other, step_folder(tmp_path, 1) / "unet")


def test_weights_of_another_class_are_refused_by_its_name(unet: UNet2DConditionModel, tmp_path: Path) -> None:
    writing = writer(tmp_path, unet)
    writing.write(snapshot(unet, 1))
    writing.finish()
    different = r"`backbone\.config`: class: UNet2DConditionModel ≠ PixArtTransformer2DModel \(pretrained ≠ config\)"
    with pytest.raises(RequestError, match=different):
        load_weights(build_network(TRANSFORMER, None), step_folder(tmp_path, 1) / "unet")


def test_an_average_begun_too_early_is_not_gone_on_with(unet: UNet2DConditionModel, tmp_path: Path) -> None:
    """On resuming with a later `start_step`: it would be kept as it is, and exported."""
    optimizer = torch.optim.AdamW(unet.parameters())
    writing = writer(tmp_path, unet)
    begun = make_averages(EmaConfig(start_step=6))
    begun["ema"].begin(unet.named_parameters())
    writing.write(take_snapshot(TrainState(step=6), unet, optimizer, begun))
    writing.finish()
    found = newest_checkpoint(tmp_path)
    assert found is not None and (found.folder / "ema").is_dir()
    for start_step, goes_on in ((2, True), (6, True), (7, False), (None, False)):
        averages = make_averages(EmaConfig(start_step=start_step))
        restore(found, unet, optimizer, averages)
        assert (averages["ema"].average is not None) == goes_on


def test_a_warning_says_that_saving_takes_longer_than_the_grace_period(monkeypatch: pytest.MonkeyPatch) -> None:
    config = CheckpointConfig(grace=60)
    assert warn_if_slow_to_stop(None, config) is None
    assert warn_if_slow_to_stop(Pace(29.0, 1.0), config) is None
    warning = warn_if_slow_to_stop(Pace(29.1, 1.0), config)
    assert warning is not None and "stopping may take 60 s, because a step takes 1.0 s and each of up to" in warning
    assert "two checkpoints takes 29 s, but the run is killed after 60 s" in warning
    assert warn_if_slow_to_stop(Pace(26.0, 7.0), config) is None and warn_if_slow_to_stop(Pace(27.0, 7.0), config)
    monkeypatch.setenv("PET_SHUTDOWN_TIMEOUT", "20")
    assert warn_if_slow_to_stop(Pace(10.0, 0.0), config) is not None


def test_a_launch_warns_at_its_start_if_the_previous_one_saved_too_slowly(
    latents: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fields = train_fields(latents, tmp_path / "run", max_steps=2, schedule={"warmup_steps": 1})
    command(["--config", str(write_config(tmp_path, fields))])
    assert "warning" not in "".join(capfd.readouterr())
    fields |= {"max_steps": 4, "checkpoint": {"every": 2, "grace": 1.0}}
    command(["--config", str(write_config(tmp_path, fields))])
    assert "".join(capfd.readouterr()).count("but the run is killed after 1 s") == 1


def test_the_young_stay_too() -> None:
    ages = {10: 9000.0, 20: 7201.0, 30: 7199.0, 40: 3600.0, 50: 0.0}
    assert superfluous(ages, CheckpointConfig(keep=1), []) == [10, 20, 30, 40]
    assert superfluous(ages, CheckpointConfig(keep=1, keep_hours=2), []) == [10, 20]
    assert superfluous(ages, CheckpointConfig(keep=2, keep_every=20), [12]) == [30]
    assert superfluous({}, CheckpointConfig(), []) == []


def test_a_machine_without_room_for_a_copy_writes_at_once(
    unet: UNet2DConditionModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checkpoint, "free_memory", lambda: 100)
    writing = writer(tmp_path, unet)
    writing.write(snapshot(unet, 1))
    assert writing.pending is None and [folder.name for folder in list_checkpoints(tmp_path)] == ["step-00000001"]
    assert "training pauses while this checkpoint is written" in capsys.readouterr().out
