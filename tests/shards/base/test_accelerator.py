"""A different accelerator is described in shards/base/device.py, and nowhere else."""

import ast
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from precompute.encode.networks import DeviceCopies
from precompute.encode.towers import DeviceClock
from shards.base import device
from shards.base.device import (
    best_device,
    collectives_backend,
    is_accelerator,
    is_device_error,
    resolve_precision,
    worker_device,
)
from shards.root.provenance import Stopwatch
from train.metrics import peak_memory
from train.model.tensors import HostCopies

ROOT = Path(__file__).parents[3]
PACKAGES = ("shards", "precompute", "train", "evaluation", "plan")
CPU = torch.device("cpu")


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Describe a fake accelerator with the CPU's device type; return the list of calls to it."""
    calls: list[str] = []
    empty = torch.empty

    def note(name: str) -> Any:
        return lambda *_, **__: calls.append(name)

    @contextmanager
    def stream(_: Any) -> Iterator[None]:
        calls.append("stream")
        yield

    def event(**_: bool) -> Any:
        return SimpleNamespace(record=note("record"), synchronize=note("synchronize"), elapsed_time=lambda other: 500.0)

    def empty_with_note(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            calls.append("pinned")
        return empty(*shape, **options)

    module = SimpleNamespace(
        is_available=lambda: True,
        is_bf16_supported=lambda including_emulation: not including_emulation,
        max_memory_allocated=lambda which: 7,
        synchronize=note("synchronize"),
        Stream=lambda which: SimpleNamespace(wait_stream=note("wait")),
        current_stream=lambda which: SimpleNamespace(wait_stream=note("wait")),
        stream=stream,
        Event=event,
    )
    for name, value in (("ACCELERATOR", "cpu"), ("COLLECTIVES", "nccl-like"), ("DEVICE_ERROR", "NPU fault")):
        monkeypatch.setattr(device, name, value)
    monkeypatch.setattr(torch, "get_device_module", {"cpu": module}.__getitem__)
    monkeypatch.setattr(torch, "empty", empty_with_note)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    return calls


@pytest.mark.usefixtures("npu")
def test_choices_follow_the_accelerator() -> None:
    assert (best_device(), worker_device(0.5), collectives_backend("cpu")) == ("cpu", "cpu", "nccl-like")
    assert is_accelerator(CPU) and not is_accelerator("cuda:0")
    assert is_device_error(RuntimeError("NPU fault: bus")) and not is_device_error(RuntimeError("CUDA error: x"))
    assert resolve_precision("auto", "cpu") == "bfloat16"
    assert peak_memory(CPU) == 7


def test_stage_1_copies_and_times_on_the_accelerator(npu: list[str]) -> None:
    copies, pixels = DeviceCopies(CPU), torch.arange(6.0).reshape(2, 3)
    host = copies.buffer((2, 3), torch.float32).copy_(pixels)
    (result,) = copies.to_host(copies.to_device(host))()
    assert result.equal(pixels)
    assert npu == ["pinned", "stream", "wait", "wait", "stream", "pinned", "record", "synchronize"]
    clock = DeviceClock(CPU, Stopwatch())
    with clock("image"):
        pass
    clock.stop()
    assert clock.stopwatch.seconds["device"] == 0.5


def test_checkpoints_are_copied_through_pinned_memory(npu: list[str]) -> None:
    copies = HostCopies()
    taken = copies.take("x", {"a": torch.ones(3)}, ["a"])
    copies.wait()
    assert taken["a"].equal(torch.ones(3)) and npu == ["pinned", "synchronize"]


@pytest.mark.parametrize("package", PACKAGES)
def test_no_other_file_names_an_accelerator(package: str) -> None:
    """Check strings and attributes, such as torch.cuda, but not docstrings and comments."""
    for path in sorted((ROOT / package).rglob("*.py")):
        if path == ROOT / "shards/base/device.py":
            continue
        text = path.read_text()
        if not re.search("cuda|nccl", text, re.IGNORECASE):  # most files; parsing them takes much longer
            continue
        tree = ast.parse(text)
        prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                name = node.attr
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
                name = node.value
            else:
                continue
            assert not {"cuda", "is_cuda", "CUDA error", "nccl"} & {name, *name.split(".")}, (
                f"{path}:{node.lineno}: {name}"
            )
