"""Devices, precisions and cores: what a command selects on this machine, and warnings about slow choices."""

import functools
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.compiler.config as compiler

from shards.base import device
from shards.base.device import (
    AttentionKernel,
    available_cores,
    choose_attention,
    choose_device,
    cpu_slowdown,
    resolve_precision,
)
from shards.base.errors import RequestError


@pytest.mark.parametrize(
    ("slowdown", "chosen"), [(0.4, "bfloat16"), (1.0, "bfloat16"), (1.2, "float32"), (17.0, "float32")]
)
def test_auto_is_bfloat16_where_it_is_no_slower(slowdown: float, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "cpu_slowdown", lambda precision: slowdown)
    said: list[str] = []
    assert resolve_precision("auto", "cpu", said.append) == chosen
    assert len(said) == 1 and chosen in said[0] and f"{slowdown:.2g} times as long" in said[0]


@pytest.mark.parametrize("asked", ["bfloat16", "float16"])
def test_an_emulated_precision_is_kept_but_warned_about(asked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    for slowdown in (17.3, 0.5):  # the second one is not worth a warning
        monkeypatch.setattr(device, "cpu_slowdown", lambda precision, slowdown=slowdown: slowdown)
        assert resolve_precision(asked, "cpu", said.append) == asked
    assert len(said) == 1 and "emulates" in said[0] and "17 times as long" in said[0] and "--precision auto" in said[0]


def test_float32_and_gpus_need_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "cpu_slowdown", lambda precision: pytest.fail("a trial was run"))
    assert resolve_precision("float32", "cpu") == "float32"
    assert resolve_precision("float16", "cuda") == "float16"
    for is_supported, chosen in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, it=is_supported: it)
        assert resolve_precision("auto", "cuda") == chosen


def test_the_trial_leaves_torch_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the trial on this CPU, which may or may not emulate bfloat16. On a clock on which every run takes a second,
    the ratio is 1."""
    threads = torch.get_num_threads()
    with torch.inference_mode():
        assert cpu_slowdown("bfloat16") > 0
    assert torch.get_num_threads() == threads
    monkeypatch.setattr(device, "time", SimpleNamespace(thread_time=itertools.count().__next__))
    assert cpu_slowdown.__wrapped__("float32") == 1


def test_a_gpu_that_torch_cannot_use_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "nvidiactl").touch()  # not a GPU
    assert choose_device("auto", tmp_path) == "cpu"
    (tmp_path / "nvidia0").touch()
    with pytest.raises(RequestError, match=r"has an NVIDIA GPU, but torch .* cannot use it .*--device cpu"):
        choose_device("auto", tmp_path)
    assert choose_device("cpu", tmp_path) == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert choose_device("auto", tmp_path) == "cpu"
    with pytest.raises(RequestError, match="A GPU was requested"):
        choose_device("cuda", tmp_path)


def test_the_driver_and_the_build_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    (tmp_path / "version").write_text("470.82.01\n")
    message = device.unusable_gpu(True, tmp_path / "version")
    assert "driver 470.82.01" in message and "CUDA 13.2" in message and "--torch-backend=auto" in message
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built for the CPU only" in device.unusable_gpu(True, tmp_path / "absent")


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("", {}, 6),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n"}, 6),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "250000 100000\n"}, 3),  # the parent group's 2.5
        ("0::/a/b\n", {"a/cpu.max": "250000 100000\n", "cpu.max": "50000 100000\n"}, 1),  # the container's own group
        ("5:memory:/x\n4:cpu,acct:/x\n", {"cpu,acct/x/cpu.cfs_quota_us": "-1"}, 6),  # version 1
        ("5:memory:/x\n4:cpu,acct:/x\n", {"cpu,acct/x/cpu.cfs_quota_us": "400000"}, 4),
    ],
)
def test_cores_are_those_of_the_affinity_and_the_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, files: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(6)))
    if own:
        (tmp_path / "own").write_text(own)
    for name, text in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(text)
        (tmp_path / "groups" / name).with_name("cpu.cfs_period_us").write_text("100000")
    assert available_cores(tmp_path / "groups", tmp_path / "own") == cores


@pytest.mark.parametrize(
    ("chosen", "kernels", "disabled"),
    [
        ("cuda:0", None, {"cudnn"}),
        ("cuda:0", ["cudnn", "math"], {"flash", "mem_efficient"}),
        ("cuda:0", ["efficient"], {"flash", "cudnn", "math"}),
        ("cpu", ["flash"], {"flash"}),
    ],
)
def test_attention_kernels_that_are_wrong_or_slow_are_disabled(
    chosen: str, kernels: list[AttentionKernel] | None, disabled: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backward pass of cuDNN attention returns NaN for some lengths on Hopper, and flash is slow on CPUs."""
    enabled = {"cudnn": True, "flash": True, "mem_efficient": True, "math": True}
    for name in enabled:
        monkeypatch.setattr(torch.backends.cuda, f"enable_{name}_sdp", functools.partial(enabled.__setitem__, name))
    expected = "" if chosen == "cpu" else f"attention {' '.join(kernels or ['efficient', 'flash', 'math'])}"
    with compiler.patch(cache_key_tag=""):  # type: ignore[attr-defined]
        choose_attention(torch.device(chosen), *([] if kernels is None else [kernels]))
        assert compiler.cache_key_tag == expected  # otherwise, torch's cache could have a graph with other kernels
    assert {name for name, on in enabled.items() if not on} == disabled
