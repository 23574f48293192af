"""The model's own arithmetic, and a small network through all of it; SD2 base in full size is slow."""

import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch

import bench.roofline.__main__ as roofline
from bench.roofline.kernels import Class, Kernel, Rates, Work, add_up
from bench.roofline.networks import Step, training_work
from plan.measured import read_rates
from tests.runs import UNET

MOST_BYTES, MOST_OTHER_LAYOUTS = 216e9, 7


def test_a_class_takes_as_long_as_the_slower_of_its_two() -> None:
    classes = {"product": Class(2, 10**12, 5 * 10**14), "pointwise": Class(9, 4 * 10**12, 0)}
    work, rates = Work(30, classes), Rates(1000.0, 0.5, 2.0)
    assert rates.seconds(work) == pytest.approx(1.0 + 2.0)  # 1 s of arithmetic hides 0.5 s of bytes
    assert rates.images_per_second(work) == pytest.approx(10.0)
    assert (work.kernels, work.bytes, work.flops) == (11, 5 * 10**12, 5 * 10**14)


def test_kernels_are_added_up_by_class() -> None:
    kernels = [Kernel("convolution", 3, 2), Kernel("convolution", 4), Kernel("pointwise", 5)]
    work = add_up(8, kernels, {"convolution": 70, "product": 9}, saved_bytes=6)
    assert work.classes["convolution"] == Class(2, 7, 70) and work.classes["product"] == Class(0, 0, 9)
    assert (work.other_layouts, work.saved_bytes, work.bytes) == (2, 6, 12)


def test_a_step_is_its_microbatches_and_the_optimizer() -> None:
    rates, work = Rates(1000.0, 0.5, 2.8), Work(8, {"product": Class(3, 0, 10**12)})
    step = work.step_of(32, 10**9)
    assert step.classes == {"product": Class(12, 0, 4 * 10**12), "optimizer": Class(0, 28 * 10**9, 0)}
    assert rates.seconds(step) == pytest.approx(4 * rates.seconds(work) + 0.01)
    assert step.images == 32 and rates.images_per_second(step) == roofline.step_rate(work, rates, 10**9, 32)


def test_the_calibrated_model_gives_the_published_rate_back() -> None:
    work, rates = Work(64, {"product": Class(1, 0, 10**14), "pointwise": Class(1, 10**12, 0)}), Rates(800.0, 1.0, 4.0)
    efficiency = roofline.efficiency_of(rates, work, 120.0)
    assert Rates(800.0, efficiency, 4.0).images_per_second(work) == pytest.approx(120.0)
    with pytest.raises(ValueError, match=r"300\.0 img/s are more than 4\.0 TB/s allow"):
        roofline.efficiency_of(rates, work, 300.0)


@pytest.fixture(scope="module")
def unet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fewest blocks that still have shortcuts, transformers and an upsampling."""
    fields = json.loads(UNET.read_text()) | {
        "block_out_channels": [16, 32],
        "layers_per_block": 1,
        "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
        "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
        "attention_head_dim": 2,
    }
    path = tmp_path_factory.mktemp("unet") / "unet.json"
    path.write_text(json.dumps(fields))
    return path


@pytest.fixture(scope="module")
def small(unet: Path) -> Work:
    """Its step, lowered."""
    return training_work(unet, Step("64x64", 2, compiled=True))


def test_a_small_unet_is_lowered_with_its_convolutions_in_channels_last(small: Work, unet: Path) -> None:
    eager = training_work(unet, Step("64x64", 2))
    assert small.flops == eager.flops > 0
    # a forward pass, and gradients of input and weights together
    assert small.classes["convolution"].kernels == eager.classes["convolution"].kernels > 20
    assert small.classes["pointwise"].kernels < eager.classes["pointwise"].kernels + eager.classes["copy"].kernels
    assert small.bytes < eager.bytes
    assert 0 < small.other_layouts <= MOST_OTHER_LAYOUTS
    assert 0 < small.saved_bytes < small.bytes


def test_a_plan_reads_it_as_modelled_and_measured_files_win(small: Work, unet: Path, tmp_path: Path) -> None:
    step, rates = Step("64x64", 2, compiled=True), Rates(790.0, 0.5, 4.3)
    options = Namespace(unet=unet, gpu="H200", batch=256)
    roofline.write_plan_file(tmp_path / "m.json", options, {step: small}, {"captions": small}, rates)
    modelled = read_rates([str(tmp_path / "m.json")], "H200")
    (rate,), (text,) = modelled.of("train", "64x64"), modelled.of("text", None)
    assert rate.assumed and rate.modelled and text.modelled and rate.source.startswith("modelled 20")
    assert rate.images_per_second_per_gpu == pytest.approx(
        roofline.step_rate(small, rates, step.num_parameters(unet), 256), rel=1e-3
    )
    measured = (
        (tmp_path / "m.json").read_text().replace('"modelled": true', '"modelled": false').replace("64x64", "32x32")
    )
    (tmp_path / "n.json").write_text(measured)
    for order in (["m.json", "n.json"], ["n.json", "m.json"]):
        both = read_rates([str(tmp_path / name) for name in order], "H200")
        assert not both.of("text", None)[0].modelled and len(both.of("text", None)) == 1
        assert both.of("train", "64x64")[0].modelled and not both.of("train", "32x32")[0].assumed


def test_nothing_of_the_pretended_gpu_stays() -> None:
    assert not torch.cuda.is_initialized() and torch.cuda.get_device_properties.__module__ == "torch.cuda"
    assert torch._C._select_conv_backend.__class__.__name__ == "builtin_function_or_method"


@pytest.mark.slow
def test_bytes_of_the_compiled_step() -> None:
    """32 images at 512 px through SD2 base, there and back: 219.5 GB before diffusers' copies were taken out."""
    work = training_work(Path("configs/unet/sd2-base.json"), Step("512x512", 32, compiled=True))
    print(f"\n{work.bytes / 1e9:.1f} GB, {work.kernels} kernels, {work.other_layouts} in another layout")
    assert work.bytes <= MOST_BYTES and work.other_layouts <= MOST_OTHER_LAYOUTS
