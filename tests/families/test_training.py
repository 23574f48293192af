"""Training of each family: stored latents match online encoding, resumes are bit-exact, and exports match the
weights."""

import copy
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

from tests import ranks
from tests.families.calls import picture
from tests.families.online import Online
from tests.families.small import ALL_BUT_SD, FAMILIES, Small, in_make_test
from tests.families.starting import small_run, started
from tests.runs import compare, curve, last_step, run_module, wait_until, write_config
from train.config import TrainConfig
from train.export.pipeline import ExportConfig, write_pipeline
from train.run.checkpoints.checkpoint import list_checkpoints
from train.trainer import Trainer

BATCH, LR, WEIGHT_DECAY = 4, 5e-4, 0.01


@pytest.fixture
def steps(pytestconfig: pytest.Config) -> int:
    """Number of steps to compare with online encoding: 20, but in `make test` 6."""
    return 6 if pytestconfig.option.markexpr == "not slow" else 20


def config_of(small: Small, run_dir: str, steps: int, **changes: Any) -> TrainConfig:
    """Return the config of a run that drops at least a fifth of the captions."""
    fields = small.train_fields(
        small.folder / run_dir,
        seed=5,
        max_steps=steps,
        global_batch_size=BATCH,
        optimizer={"lr": LR, "weight_decay": WEIGHT_DECAY},
        schedule={"warmup_steps": 0},
        **changes,
    )
    fields["objective"]["caption_dropout"] = max(0.2, fields["objective"].get("caption_dropout", 0.1))
    return TrainConfig.model_validate(fields)


def align(pipeline: Any) -> None:
    """Copy all weights to new memory: memory-mapped weights may not be aligned to cache lines, and some processors'
    kernels then round differently."""
    for module in pipeline.components.values():
        if isinstance(module, torch.nn.Module):
            for weight in module.parameters():
                weight.data = weight.data.clone()


def trained(trainer: Trainer, steps: int) -> list[list[str]]:
    """Train for `steps` without saving; return the keys of each step's batch."""
    keys = []
    for batch in trainer.loader:
        keys.append(batch.keys)
        result = trainer.train_step(batch, trainer.state.step)
        trainer.state.step += 1
        trainer.metrics.add(batch, result)
        if trainer.state.step == steps:
            break
    trainer.metrics.collect()
    return keys


@pytest.mark.parametrize(
    ("name", "stored", "tolerance"),
    [
        ("pixart-sigma", {"trim": True}, 3e-4),
        ("sana", {"trim": True}, 3e-4),
        pytest.param("prx", {"trim": True}, 3e-4, marks=pytest.mark.slow),
        ("flux1", {"storage": "float8"}, 1.2e-3),
        ("sdxl", {"storage": "float8", "image": "int8"}, 7e-3),
        pytest.param(
            "pixart-sigma", {"storage": "float8", "trim": True, "image": "int8"}, 7e-3, marks=pytest.mark.slow
        ),
        pytest.param("sd3", {"storage": "float8", "image": "int8"}, 7e-3, marks=pytest.mark.slow),
        pytest.param("flux1", {"storage": "float8", "image": "int8"}, 7e-3, marks=pytest.mark.slow),
        pytest.param("sana", {"storage": "float8", "trim": True}, 7e-3, marks=pytest.mark.slow),
        # as shipped
        pytest.param("prx", {"storage": "float8", "trim": True, "image": "int8"}, 7e-3, marks=pytest.mark.slow),
    ],
)
def test_small_storage_keeps_its_bound(
    name: str, stored: dict[str, Any], tolerance: float, small: Callable[[str], Small], steps: int
) -> None:
    """Check the bounds of tests/train/test_cached_equals_online.py."""
    how = "-".join(map(str, stored.values()))
    made = replace(small(name), latents=f"stored-{how}")
    made.encode(**stored)
    config = config_of(made, f"small-{how}", steps)
    run = started(config)
    network = copy.deepcopy(run.train_step.network)
    expected = Online(made, network, config).train(trained(run, steps), LR, WEIGHT_DECAY)
    differences = [abs(one - other) / other for one, other in zip(run.state.losses, expected, strict=True)]
    print(f"\n| {name}, {stored} | {max(differences):.1e} | {np.mean(differences):.1e} |")
    assert max(differences) < tolerance


@pytest.mark.parametrize("name", ALL_BUT_SD)
def test_it_trains_as_online_and_is_exported(name: str, small: Callable[[str], Small], steps: int) -> None:
    made = small(name)
    config = config_of(made, "run", steps, ema={"start_step": None}, log={"every": 1000})
    run = started(config)
    network = copy.deepcopy(run.train_step.network)
    keys = trained(run, steps)
    losses = run.state.losses
    expected = Online(made, network, config).train(keys, LR, WEIGHT_DECAY)
    differences = [abs(one - other) / other for one, other in zip(losses, expected, strict=True)]
    print(f"\n| {name} | {max(differences):.1e} | {np.mean(differences):.1e} |")
    assert len(losses) == steps and max(differences) < 1e-4
    run.save(is_last=True)
    folder = write_pipeline(config.work, ExportConfig())
    class_name = config.backbone.pipeline.class_name
    exported = getattr(diffusers, class_name).from_pretrained(folder)
    assert type(exported).__name__ == class_name
    in_memory = made.pipeline(run.train_step.network.eval(), exported.scheduler)
    for pipeline in (exported, in_memory):
        align(pipeline)
    one, other = (picture(name, pipeline) for pipeline in (exported, in_memory))
    assert one.shape == (64, 64, 3) and np.isfinite(one).all() and one.std() > 0
    np.testing.assert_array_equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_run_that_is_killed_goes_on_bit_by_bit(name: str, small: Callable[[str], Small]) -> None:
    """Send SIGKILL at some point after the first checkpoint, run the command again, and compare curve, samples and all
    files."""
    made = small(name)
    fields = {run: made.train_fields(made.folder / run, max_steps=30) for run in ("undisturbed", "killed")}
    configs = {run: str(write_config(made.folder, fields[run])) for run in fields}
    killed = made.folder / "killed"
    (process,) = ranks.start(made.folder / "log", ["--config", configs["killed"]])
    wait_until(lambda: last_step(killed) >= 5 and list_checkpoints(killed), process=process)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL and last_step(killed) < 30
    for run in configs:
        result = run_module("train", "--config", configs[run])
        assert result.returncode == 0, result.stderr
    assert f"resuming {killed} after step" in result.stdout
    print(f"\n{name}: {compare(killed, made.folder / 'undisturbed')}")


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_any_number_of_ranks_trains_alike(name: str, small: Callable[[str], Small]) -> None:
    """Compare 1, 2 and 4 processes, and 2 with sharded weights."""
    made = small(name)
    curves = []
    for processes, sharding in [(1, "none"), (2, "none"), (2, "full"), (4, "none")]:
        run_dir = made.folder / f"{processes}-{sharding}"
        fields = small_run(made, run_dir.name, sharding=sharding, microbatch_size=2)
        ranks.run(run_dir.with_suffix(".log"), ["--config", str(write_config(made.folder, fields))], processes)
        losses, keys = curve(run_dir)
        curves.append((losses, [sorted(step) for step in keys]))
    for losses, keys in curves[1:]:
        assert keys == curves[0][1]
        np.testing.assert_allclose(losses, curves[0][0], rtol=1e-5)


@pytest.mark.parametrize("name", in_make_test("sdxl", "sana"))
def test_it_trains_in_bfloat16_with_checkpointing(name: str, small: Callable[[str], Small]) -> None:
    """Train in bfloat16 autocast, as on a GPU; the loss is close to that in float32."""
    made, losses = small(name), []
    for precision in ("float32", "bfloat16"):
        lower = precision != "float32"
        fields = small_run(
            made, precision, precision=precision, gradient_checkpointing=lower, low_precision_norms=lower
        )
        run = started(TrainConfig.model_validate(fields))
        run.train_step.weight_casts = torch.autocast("cpu", torch.bfloat16, enabled=lower)
        trained(run, 2)
        losses.append(run.state.losses)
    np.testing.assert_allclose(losses[1], losses[0], rtol=0.05)
    assert losses[1] != losses[0]
