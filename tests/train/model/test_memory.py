"""Estimates of GPU memory: bytes counted by hand, and the allocations of real steps on a CPU."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import profile

from bench.kit.roots import encoding_record
from shards.base.errors import RequestError
from shards.format.encoding import EncodingRecord
from tests import ranks
from tests.runs import UNET
from train.memory import check_memory
from train.model.backbone import BackboneConfig
from train.model.channels_last import keep_channels_last
from train.model.fit import dry_call
from train.model.memory import (
    GIB,
    LiveBytes,
    StepMemory,
    StepSettings,
    activation_bytes,
    largest_microbatch,
    run_passes,
    step_memory,
    usable,
)
from train.model.network import build_network
from train.model.optimizer import freeze_except

HW = (32, 32)
SETTINGS = StepSettings("float32", microbatch_size=4, images=8, optimizer_bytes=8, num_averages=0)


@pytest.fixture(scope="module")
def unet() -> Any:
    return build_network(UNET, 0)


@pytest.fixture(scope="module")
def encoding(unet: Any) -> EncodingRecord:
    return encoding_record(8, unet.config.cross_attention_dim)


@pytest.fixture(scope="module")
def backbone(encoding: EncodingRecord) -> BackboneConfig:
    return BackboneConfig().resolved(encoding.texts)


def memory(unet: Any, backbone: BackboneConfig, encoding: EncodingRecord, **changes: Any) -> StepMemory:
    return step_memory(unet, backbone, encoding, HW, replace(SETTINGS, **changes))


def test_live_bytes_by_hand() -> None:
    kilobyte, held = 1024, torch.zeros(1024)
    with LiveBytes() as live:
        live.ignore([held])
        held.add_(1)  # returns an ignored tensor
        a = torch.empty(kilobyte, dtype=torch.uint8)
        view = a[:100]
        b = a + 1
        assert (live.now, live.peak) == (2 * kilobyte, 2 * kilobyte)
        del a, b
        assert live.now == kilobyte  # the view keeps `a`'s bytes
        del view
        assert (live.now, live.peak) == (0, 2 * kilobyte)
        c = torch.empty(1)
        assert live.now == 512  # rounded up, as by torch's allocator
    del c


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("size", [2, 8])
def test_a_real_step_allocates_as_much(
    unet: Any, backbone: BackboneConfig, encoding: EncodingRecord, size: int, checkpointing: bool
) -> None:
    """Compare with the peak of the allocations and releases that torch's profiler records on a CPU."""
    settings = replace(SETTINGS, microbatch_size=size, gradient_checkpointing=checkpointing)
    real: Any
    real, call = dry_call(unet, backbone, encoding, HW, size, "cpu")
    real.to_empty(device="cpu")
    real.load_state_dict(unet.state_dict())
    keep_channels_last(real)
    if checkpointing:
        real.enable_gradient_checkpointing()
    run_passes(call, "float32")  # creates the gradients
    with profile(profile_memory=True) as profiled:
        run_passes(call, "float32")
    events = profiled.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    now = peak = 0
    for _, num_bytes in changes:
        now += num_bytes
        peak = max(peak, now)
    assert activation_bytes(unet, backbone, encoding, HW, settings) == pytest.approx(peak, rel=0.02)


def test_state(unet: Any, backbone: BackboneConfig, encoding: EncodingRecord) -> None:
    count = sum(weight.numel() for weight in unet.parameters())
    found = memory(unet, backbone, encoding, num_averages=2)
    assert (found.weights, found.gradients, found.optimizer, found.averages) == (
        4 * count,
        4 * count,
        8 * count,
        8 * count,
    )
    sharded = memory(unet, backbone, encoding, num_averages=2, sharding="full", num_processes=4)
    assert (sharded.weights, sharded.averages) == (count, 2 * count)
    alone = memory(unet, backbone, encoding, sharding="full")
    assert alone.weights == 4 * count


def test_frozen_weights_need_no_gradients(backbone: BackboneConfig, encoding: EncodingRecord) -> None:
    whole, part = build_network(UNET, None), build_network(UNET, None)
    freeze_except(part, ["*attn2*"])
    trained = sum(weight.numel() for weight in part.parameters() if weight.requires_grad)
    all_memory, part_memory = (memory(network, backbone, encoding) for network in (whole, part))
    assert (part_memory.gradients, part_memory.optimizer) == (4 * trained, 8 * trained)
    assert part_memory.weights == all_memory.weights
    assert part_memory.activations < all_memory.activations


def test_settings_that_save_memory(unet: Any, backbone: BackboneConfig, encoding: EncodingRecord) -> None:
    plain = memory(unet, backbone, encoding, precision="bfloat16").activations
    assert plain < memory(unet, backbone, encoding).activations
    assert memory(unet, backbone, encoding, precision="bfloat16", low_precision_norms=True).activations < plain
    assert memory(unet, backbone, encoding, precision="bfloat16", gradient_checkpointing=True).activations < plain / 2
    assert memory(unet, backbone, encoding, precision="bfloat16", microbatch_size=2).activations < plain


def test_a_compiled_step_saves_fewer_activations(unet: Any, backbone: BackboneConfig, encoding: EncodingRecord) -> None:
    eager, compiled = (
        memory(unet, backbone, encoding, compile=compile, sharding="full", num_processes=2) for compile in (False, True)
    )
    assert 0.3 * eager.activations < compiled.activations < eager.activations


def test_largest_microbatch(unet: Any, backbone: BackboneConfig, encoding: EncodingRecord) -> None:
    """A step with the size that fits does fit, and one image more does not."""
    first, second = ((size, memory(unet, backbone, encoding, microbatch_size=size)) for size in (4, 8))
    capacity = int(memory(unet, backbone, encoding, microbatch_size=20).total * 1.01 / (1 - 0.08))
    size = largest_microbatch(first, second, capacity)
    assert size == 20
    assert memory(unet, backbone, encoding, microbatch_size=size).total <= usable(capacity)
    assert memory(unet, backbone, encoding, microbatch_size=size + 1).total > usable(capacity)
    assert largest_microbatch(first, second, 1024) == 0


def test_a_step_that_does_not_fit_is_refused(
    unet: Any, backbone: BackboneConfig, encoding: EncodingRecord, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = memory(unet, backbone, encoding).total
    check_memory(unet, backbone, encoding, HW, SETTINGS, 2 * needed)
    assert capsys.readouterr().out == ""
    check_memory(unet, backbone, encoding, HW, SETTINGS, int(1.02 * needed))
    assert capsys.readouterr().out.startswith("warning: A step with microbatches of 4 needs about ")
    with pytest.raises(RequestError, match=r"set `microbatch_size` to 3, which .* `gradient_checkpointing`"):
        check_memory(unet, backbone, encoding, HW, SETTINGS, int(0.9 * needed))


@pytest.mark.parametrize("sharding", ["full", "grad_op"])
def test_sharded_weights_need_no_more_than_estimated(sharding: str, tmp_path: Path) -> None:
    """Compare with the live storages of FSDP2 on two gloo ranks."""
    program = "tests.train.model.memory_ranks:record"
    processes = ranks.start(tmp_path / "log", [sharding, str(tmp_path / "found")], 2, program=program)
    assert ranks.wait(processes, 300) == [0, 0], (tmp_path / "log").read_text()
    real, estimated = map(int, (tmp_path / "found").read_text().split())
    assert real <= estimated < 1.3 * real
    assert estimated < GIB
