"""Devices, precisions and cores: what a command selects on this machine, and warnings about slow choices."""

from pathlib import Path

import pytest
import torch

from shards.base import device
from shards.base.device import available_cores, choose_device, cpu_slowdown, resolve_precision
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
def test_an_emulated_precision_is_kept_but_warned_about(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "cpu_slowdown", lambda precision: 17.3)
    said: list[str] = []
    assert resolve_precision(asked, "cpu", said.append) == asked  # type: ignore[arg-type]
    assert len(said) == 1 and "emulates" in said[0] and "17 times as long" in said[0] and "--precision auto" in said[0]
    monkeypatch.setattr(device, "cpu_slowdown", lambda precision: 0.5)
    assert resolve_precision(asked, "cpu", said.append) == asked and len(said) == 1


def test_float32_and_gpus_need_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "cpu_slowdown", lambda precision: pytest.fail("a trial was run"))
    assert resolve_precision("float32", "cpu") == "float32"
    assert resolve_precision("float16", "cuda") == "float16"
    for is_supported, chosen in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, it=is_supported: it)
        assert resolve_precision("auto", "cuda") == chosen


def test_the_trial_leaves_torch_as_it_was() -> None:
    """Run the trial on this CPU, which may or may not emulate bfloat16; float32 relative to itself is 1."""
    threads = torch.get_num_threads()
    with torch.inference_mode():
        assert cpu_slowdown("bfloat16") > 0
    assert torch.get_num_threads() == threads
    assert 0.2 < cpu_slowdown("float32") < 5


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


def test_cores_are_those_of_the_affinity_and_the_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(6)))
    own, cgroups = tmp_path / "own", tmp_path / "cgroups"
    assert available_cores(cgroups, own) == 6
    own.write_text("0::/a/b\n")
    (cgroups / "a" / "b").mkdir(parents=True)
    (cgroups / "a" / "b" / "cpu.max").write_text("max 100000\n")
    assert available_cores(cgroups, own) == 6
    (cgroups / "a" / "cpu.max").write_text("250000 100000\n")  # the parent group allows 2.5 cores
    assert available_cores(cgroups, own) == 3
    (cgroups / "cpu.max").write_text("50000 100000\n")  # the container's own cgroup
    assert available_cores(cgroups, own) == 1


def test_quotas_of_cgroups_version_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(6)))
    own, folder = tmp_path / "own", tmp_path / "cpu,cpuacct" / "job"
    own.write_text("5:memory:/job\n4:cpu,cpuacct:/job\n")
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_period_us").write_text("100000")
    for quota, cores in ((-1, 6), (400000, 4)):
        (folder / "cpu.cfs_quota_us").write_text(str(quota))
        assert available_cores(tmp_path, own) == cores
