"""Commands that end without importing torch: invalid requests and finished runs; the message at the end of a run."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from shards.base.errors import RequestError
from tests.runs import PYTHON, environment, launcher, run_module, train_fields, write_config
from train.__main__ import run as train
from train.config import TrainConfig
from train.early import describe_finished
from train.run.checkpoints.checkpoint import step_folder

HEAVY = ("torch", "accelerate", "diffusers", "transformers")
PROGRAM = """
import contextlib, io, json, sys
from shards.base.errors import exit_code_of
from train.__main__ import run
from train.launch import launch
for function, arguments in json.loads(sys.argv[1]):
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = exit_code_of(lambda: (launch if function == "launch" else run)(arguments))
    print(json.dumps([code, output.getvalue(), [name for name in {heavy} if name in sys.modules]]))
"""


def run_fresh(*commands: tuple[str, list[str]]) -> list[tuple[int, str]]:
    """Run (`run` or `launch`, arguments) in turn in a fresh interpreter, which must not import a heavy module.

    Returns:
        The exit code and the output of each command.
    """
    program = PROGRAM.replace("{heavy}", repr(HEAVY))
    words = [*PYTHON, "-c", program, json.dumps(commands)]
    result = subprocess.run(words, capture_output=True, text=True, env=environment(), timeout=300)
    assert result.returncode == 0, result.stderr
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert [imported for _, _, imported in found] == [[]] * len(commands)
    return [(code, " ".join(output.split())) for code, output, _ in found]


@pytest.fixture(scope="module")
def finished(latents: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Config of a run that two processes have completed, with a second phase in the same folder; and its output."""
    folder = tmp_path_factory.mktemp("finished")
    fields = train_fields(latents, folder / "phase1", max_steps=2, checkpoint={"every": 1})
    config = write_config(folder, fields)
    write_config(folder, train_fields(latents, folder / "phase2", init_from=str(folder / "phase1")))
    write_config(folder, train_fields(latents, folder / "other", init_from=str(folder / "elsewhere")))
    (folder / "phase2-long.yaml").write_text("base: phase2.yaml\nmax_steps: 100\n")
    (folder / "broken.yaml").write_text("a: [")
    result = run_module("train", "--config", str(config), num_processes=2)
    assert result.returncode == 0, result.stderr
    return config, result.stdout


def test_the_final_message_lists_the_checkpoint_and_the_next_commands_once(finished: tuple[Path, str]) -> None:
    config, printed = finished
    lines, run = printed.splitlines(), config.parent / "phase1"
    assert lines.count(f"Finished at step 2. Checkpoint: {step_folder(run, 2)}") == 1
    assert lines[lines.index("Next:") + 1 :][:4] == [
        f"  python -m evaluation sample --config configs/evaluate.yaml --model {run} --prompts.file prompts.txt",
        f"  python -m train export {run}",
        f"  python -m train --config {config.parent / 'phase2-long.yaml'}",
        f"  python -m train --config {config.parent / 'phase2.yaml'}",
    ]
    assert "other.yaml" not in printed
    # a second launch of two processes finds the run finished, and says so once, too
    result = run_module("train", "--config", str(config), num_processes=2)
    said = "has already reached max_steps (2), so there is nothing to do"
    assert result.returncode == 0 and result.stdout.count(said) == 1


def test_a_finished_run_is_recognised_without_torch(finished: tuple[Path, str]) -> None:
    words = ["--config", str(finished[0])]
    launch = [*launcher(2)[3:], "-m", "train", *words, "--num_processes", "2"]
    found = run_fresh(("run", words), ("run", ["check", *words]), ("launch", launch))
    for code, printed in found:
        assert code == 0 and "has already reached max_steps (2), so there is nothing to do." in printed
    # `make train` runs the check first and then the trainer
    assert ["Finished at step 2." in printed for _, printed in found] == [True, False, True]


def test_auto_precision_with_a_damaged_config_is_refused(finished: tuple[Path, str], tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("precision: [")
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    message = rf"{tmp_path}/config\.yaml is damaged, so the run's earlier precision is unknown\. Set `precision` to it;"
    with pytest.raises(RequestError, match=message):
        train(["--config", str(finished[0]), "--run_dir", str(tmp_path), "--precision", "auto"])


def test_a_finished_run_with_a_changed_config_is_fully_checked(
    finished: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["check", "--config", str(finished[0])]
    with pytest.raises(RequestError, match="was trained with different settings"):
        train([*words, "--seed", "5"])
    train([*words, "--max_steps", "3"])
    assert "would resume after step 2" in capsys.readouterr().out


def test_a_run_whose_last_checkpoint_is_damaged_is_not_finished(finished: tuple[Path, str]) -> None:
    config, _ = finished
    weights = step_folder(config.parent / "phase1", 2) / "unet" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    again = run_module("train", "--config", str(config))
    assert again.returncode == 0, again.stderr
    assert "is damaged and will be skipped" in again.stdout and "nothing to do" not in again.stdout
    assert again.stdout.count("Finished at step 2.") == 1


def test_invalid_requests_are_refused_without_torch(latents: Path, tmp_path: Path) -> None:
    (tmp_path / "copied" / "checkpoints" / "step-00000002.0001").mkdir(parents=True)
    absent: dict[str, Any] = {"data": {"streams": [{"root": "/absent", "bucket": "64x64"}]}}
    changes: list[tuple[dict[str, Any], str]] = [
        ({"optimiser": {"lr": 1.0}}, "unknown key `optimiser` (did you mean `optimizer`?)"),
        ({"max_steps": 0}, "`max_steps` = 0"),
        ({"optimizer": {"lr": -1.0}}, "`optimizer.lr` = -1.0: input should be greater than 0"),
        (absent, "/absent is not a latents root"),
        (
            {"init_from": "/absent"},
            "init_from is /absent, which has no complete checkpoint. Train that run first (for phase 1: `make train "
            "PHASE=1`)",
        ),
        ({"init_from": str(tmp_path / "copied")}, "copied was copied from a URL, where checkpoint names end with"),
        ({"run_dir": "/dev/null"}, "run_dir /dev/null cannot be used: /dev/null is a file"),
        ({"global_batch_size": 10}, "or data.num_canonical_nodes to 2"),
        ({"evaluate": {"every": 3}}, "evaluate.every 3 is not a multiple of checkpoint.every 2"),
    ]
    commands, messages = [], []
    for number, (fields, message) in enumerate(changes):
        config = write_config(tmp_path / str(number), train_fields(latents, tmp_path / "run", **fields))
        commands += [("run", [*command, "--config", str(config)]) for command in ([], ["check"])]
        messages += [message, message]
    three = [
        "--config",
        str(write_config(tmp_path / "three", train_fields(latents, tmp_path / "run", num_processes=3))),
    ]
    commands += [("run", three), ("run", ["check", *three]), ("run", ["--config", str(tmp_path / "phase3.yaml")])]
    messages += ["num_processes is 3, but 1 process was started"]
    messages += ["global_batch_size 8 is not divisible by the number of processes (3)"]
    messages += [f"The config file {tmp_path / 'phase3.yaml'} does not exist"]
    commands.append(("launch", [*launcher(2)[3:], "-m", "train", *commands[0][1]]))
    messages.append(changes[0][1])
    found = run_fresh(*commands)
    assert [code for code, _ in found] == [2] * len(commands)
    assert [printed.count(message) for (_, printed), message in zip(found, messages, strict=True)] == [1] * len(found)
    assert not (tmp_path / "run").exists()


def test_the_next_commands_of_a_run_at_a_url_are_quoted(tmp_path: Path) -> None:
    config = TrainConfig.model_validate(train_fields(tmp_path, tmp_path) | {"run_dir": "s3://bucket/run 1"})
    said = describe_finished(config, 2, 1, None)
    assert "  python -m train export 's3://bucket/run 1' --output 'runs/run 1/export'" in said.splitlines()
