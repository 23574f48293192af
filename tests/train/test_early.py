"""Commands that end without importing torch: invalid requests and finished runs; the message at the end of a run."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.runs import PYTHON, environment, launcher, run_module, train_fields, write_config
from train.run.checkpoints.checkpoint import step_folder

HEAVY = ("torch", "accelerate", "diffusers", "transformers")


def run_fresh(*arguments: str, module: str = "train.__main__:run") -> tuple[int, str, set[str]]:
    """Call a command in a fresh interpreter; return its exit code, its output, and which heavy modules it imported."""
    module, _, function = module.partition(":")
    program = f"""
import json, sys
from shards.base.errors import exit_code_of
from {module} import {function} as command
code = exit_code_of(lambda: command({list(arguments)!r}))
print(json.dumps([code, [name for name in {HEAVY!r} if name in sys.modules]]))
"""
    result = subprocess.run([*PYTHON, "-c", program], capture_output=True, text=True, env=environment(), timeout=300)
    assert result.returncode == 0, result.stderr
    code, imported = json.loads(result.stdout.splitlines()[-1])
    return code, " ".join((result.stdout + result.stderr).split()), set(imported)


@pytest.fixture(scope="module")
def finished(latents: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Config of a run that has completed its two steps, with a second phase in the same folder; and the output of the
    run."""
    folder = tmp_path_factory.mktemp("finished")
    config = write_config(folder, train_fields(latents, folder / "phase1", max_steps=2))
    write_config(folder, train_fields(latents, folder / "phase2", init_from=str(folder / "phase1")))
    write_config(folder, train_fields(latents, folder / "other", init_from=str(folder / "elsewhere")))
    (folder / "broken.yaml").write_text("a: [")
    result = run_module("train", "--config", str(config))
    assert result.returncode == 0, result.stderr
    return config, result.stdout


def check_message(folder: Path, printed: str) -> None:
    """Check the last step, the checkpoint, and that each next command has a line of its own."""
    lines = printed.splitlines()
    run = folder / "phase1"
    assert lines.count(f"Finished at step 2. Checkpoint: {step_folder(run, 2)}") == 1
    assert lines[lines.index("Next:") + 1 :][:3] == [
        f"  python -m evaluation score --config configs/evaluate.yaml --model {run}",
        f"  python -m train export {run}",
        f"  python -m train --config {folder / 'phase2.yaml'}",
    ]
    assert "other.yaml" not in printed


def test_the_final_message_lists_the_checkpoint_and_the_next_commands(finished: tuple[Path, str]) -> None:
    config, printed = finished
    check_message(config.parent, printed)


def test_two_processes_print_the_final_message_once(latents: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, train_fields(latents, tmp_path / "run", max_steps=1))
    result = run_module("train", "--config", str(config), num_processes=2)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("Finished at step 1.") == 1
    # a second launch, which finds the run finished, prints it only once, too
    result = run_module("train", "--config", str(config), num_processes=2)
    assert result.returncode == 0 and result.stdout.count("has completed its 1 steps; there is nothing to do") == 1


@pytest.mark.parametrize("command", [[], ["check"]], ids=["train", "check"])
def test_a_finished_run_is_recognised_without_torch(finished: tuple[Path, str], command: list[str]) -> None:
    config, _ = finished
    code, printed, imported = run_fresh(*command, "--config", str(config))
    assert (code, imported) == (0, set())
    assert "has completed its 2 steps; there is nothing to do." in printed
    assert ("Finished at step 2." in printed) == (not command)  # `make train` runs the check first and then the trainer


def test_the_launcher_recognises_a_finished_run_before_it_starts_processes(finished: tuple[Path, str]) -> None:
    config, _ = finished
    command = [*launcher(2)[3:], "-m", "train", "--config", str(config), "--num_processes", "2"]
    code, printed, imported = run_fresh(*command, module="train.launch:launch")
    assert (code, imported) == (0, set())
    assert "has completed its 2 steps; there is nothing to do" in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seed", "5"], "was trained with different settings"),
        (["--max_steps", "3"], None),
        (["--optimizer.lr", "0.5"], None),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_finished_run_with_a_changed_config_is_fully_checked(
    finished: tuple[Path, str], options: list[str], message: str | None
) -> None:
    config, _ = finished
    code, printed, imported = run_fresh("check", "--config", str(config), *options)
    assert imported >= {"torch"}
    assert (code, message is None or message in printed) == (0 if message is None else 2, True)


def test_a_run_whose_last_checkpoint_is_damaged_is_not_finished(latents: Path, tmp_path: Path) -> None:
    fields = train_fields(latents, tmp_path / "run", max_steps=2, checkpoint={"every": 1})
    config = write_config(tmp_path, fields)
    assert run_module("train", "--config", str(config)).returncode == 0
    weights = step_folder(tmp_path / "run", 2) / "unet" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    again = run_module("train", "--config", str(config))
    assert again.returncode == 0, again.stderr
    assert "is damaged and skipped" in again.stdout and "nothing to do" not in again.stdout
    assert again.stdout.count("Finished at step 2.") == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimiser": {"lr": 1.0}}, "unknown key `optimiser` (did you mean `optimizer`?)"),
        ({"max_steps": 0}, "`max_steps` = 0"),
        ({"data": {"streams": [{"root": "/absent", "bucket": "64x64"}]}}, "/absent is not a latents root"),
        ({"init_from": "/absent"}, "/absent has no complete checkpoint"),
        ({"run_dir": "/dev/null"}, "run_dir /dev/null cannot be used: /dev/null is a file"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("command", [[], ["check"]], ids=["train", "check"])
def test_an_invalid_request_is_refused_without_torch(
    latents: Path, tmp_path: Path, command: list[str], changes: dict[str, Any], message: str
) -> None:
    config = write_config(tmp_path, train_fields(latents, **({"run_dir": tmp_path / "run"} | changes)))
    code, printed, imported = run_fresh(*command, "--config", str(config))
    assert (code, imported) == (2, set())
    assert message in printed
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ([], "num_processes is 3, but 1 process was started"),
        (["check"], "global_batch_size 8 cannot be shared evenly by 3"),
    ],
    ids=["train", "check"],
)
def test_a_wrong_number_of_processes_is_refused_without_torch(
    latents: Path, tmp_path: Path, command: list[str], message: str
) -> None:
    config = write_config(tmp_path, train_fields(latents, tmp_path / "run", num_processes=3))
    code, printed, imported = run_fresh(*command, "--config", str(config))
    assert (code, imported) == (2, set()) and message in printed


def test_a_missing_config_is_refused_without_torch(tmp_path: Path) -> None:
    code, printed, imported = run_fresh("--config", str(tmp_path / "phase3.yaml"))
    assert (code, imported) == (2, set())
    assert "There is no config file" in printed


def test_the_launcher_refuses_an_invalid_config_once(latents: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, train_fields(latents, tmp_path / "run", optimiser={"lr": 1.0}))
    command = [*launcher(2)[3:], "-m", "train", "--config", str(config)]
    code, printed, imported = run_fresh(*command, module="train.launch:launch")
    assert (code, imported) == (2, set())
    assert printed.count("unknown key `optimiser`") == 1
