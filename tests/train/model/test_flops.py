"""Counted arithmetic against hand counts and the plan's, devices by their names, and what a log line is made of."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, UNet2DConditionModel

from bench.kit.roots import encoding_record
from plan.arithmetic.work import count_work
from plan.config import Networks
from shards.base.errors import RequestError
from train.model.backbone import BackboneConfig
from train.model.fit import on_meta
from train.model.flops import TRAIN_OVER_FORWARD, count_flops, peak_tflops, training_flops
from train.run.log import flat_numbers
from train.run.preflight import check_tracker

CONFIGS = Path(__file__).parents[3] / "configs" / "unet"


def unet_of(path: Path) -> UNet2DConditionModel:
    with torch.device("meta"):
        return UNet2DConditionModel.from_config(json.loads(path.read_text()))


def call(unet: UNet2DConditionModel, latent_hw: tuple[int, int], *text: int) -> Callable[[], Any]:
    encoding = encoding_record(*text)
    return on_meta(unet, BackboneConfig().resolved(encoding.texts), encoding, latent_hw)[1]


def test_counting_by_hand() -> None:
    """A convolution and an attention: 2 × multiply-adds."""
    n, c_in, c_out, side, tokens, heads, width = 2, 3, 5, 8, 7, 4, 16
    with torch.device("meta"):
        convolution = torch.nn.Conv2d(c_in, c_out, 3, padding=1)
        assert count_flops(convolution, torch.empty(n, c_in, side, side)) == 2 * n * side**2 * c_out * c_in * 9
        q, k = torch.empty(n, heads, side, width), torch.empty(n, heads, tokens, width)
        attention = torch.nn.functional.scaled_dot_product_attention
        assert count_flops(attention, q, k, k) == 2 * (2 * n * heads * side * tokens * width)


def test_sd2_is_counted_as_the_plan_counts_it() -> None:
    unet = unet_of(CONFIGS / "sd2-base.json")
    found = training_flops(call(unet, (32, 32), 77, 1024))
    assert found == count_work(Networks(), ["256x256"]).train["256x256"]
    assert round(found / TRAIN_OVER_FORWARD / 1e9, 1) == 181.1


def test_a_training_step_is_three_forward_passes() -> None:
    """Forward and backward, really run, against three times the forward."""
    unet = UNet2DConditionModel.from_config(json.loads((Path(__file__).parents[2] / "tiny_unet.json").read_text()))
    latents, text = torch.randn(1, 4, 8, 8), torch.randn(1, 16, 16)

    def step(latents: torch.Tensor, text: torch.Tensor) -> None:
        unet(latents, torch.tensor([5]), text).sample.sum().backward()

    assert count_flops(step, latents, text) == pytest.approx(training_flops(call(unet, (8, 8), 16, 16)), rel=0.05)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA A10G", 70.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("Tesla T4", None),
    ],
)
def test_peaks_by_name(name: str, expected: float | None) -> None:
    assert peak_tflops(name) == expected


def test_trackers_get_numbers_alone() -> None:
    fields = {"loss": 1.5, "mfu": None, "loss_by_quarter": {"0-249": 0.5, "250-499": None}, "ema": True}
    assert flat_numbers(fields) == {"loss": 1.5, "loss_by_quarter/0-249": 0.5, "ema": True}


def test_trackers_are_accelerates(monkeypatch: pytest.MonkeyPatch) -> None:
    check_tracker("none")
    check_tracker("tensorboard")
    with pytest.raises(RequestError, match=r"tensorbord is unknown\. Set it to none, or to one of aim, clearml"):
        check_tracker("tensorbord")
    monkeypatch.setattr("train.run.preflight.get_available_trackers", lambda: [])
    with pytest.raises(RequestError, match="comet_ml needs a package that is not installed"):
        check_tracker("comet_ml")


@pytest.mark.parametrize(("name", "parameters"), [("sd15", 859_520_964), ("small", 46_895_364)])
def test_shipped_unets_have_their_parameters(name: str, parameters: int) -> None:
    assert sum(parameter.numel() for parameter in unet_of(CONFIGS / f"{name}.json").parameters()) == parameters


def test_the_card_of_an_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it says, from a checkpoint's state; that its code runs is in tests/test_end_to_end.py."""
    from train.config import TrainConfig
    from train.export.card import model_card

    encoding = encoding_record(16, 16)
    fields: Any = {
        "run_dir": tmp_path / "phase9",
        "max_steps": 7,
        "unet": "configs/unet/small.json",
        "data": {
            "streams": [{"root": "r", "bucket": "64x96"}],
            "filter": {"aesthetic": {"min": 4.5}, "width": {"min": 64, "max": 99}},
        },
        "objective": {"prediction": "flow_matching", "timestep_sampling": "logit_normal", "logit_std": 0.8},
        "ema": {"kind": "power", "start_step": 3},
    }
    stream = {"bucket": "64x96", "weight": 1.0, "samples": 1234, "index_sha256": 64 * "b", "encoding_id": "cafe"}
    unet = {"block_out_channels": [1, 2], "cross_attention_dim": 16}
    checkpoint = {
        "state": {"step": 7},
        "fingerprint": {"streams": [stream], "global_batch_size": 2048, "unet": unet},
        "files": {"ema/diffusion_pytorch_model.safetensors": 64 * "c"},
    }
    config = TrainConfig.model_validate(fields)
    described = (encoding, [encoding.texts["text"]], "ema", DPMSolverMultistepScheduler())
    card = model_card(tmp_path / "phase9", tmp_path, config, checkpoint, *described)
    for words in (
        "# phase9",
        "| steps | 7 of 2048 samples |",
        "flow matching, logit_normal times of mean 0 and deviation 0.8",
        "their moving average (power function of width 0.1, from step 3 on)",
        "1,234 samples at 64x96 px with width ≥ 64 and width ≤ 99 and aesthetic ≥ 4.5 (missing: drop), 1 passes an "
        "epoch; encoding `cafe`",
        "height=96, width=64",
        "`" + 64 * "c" + "`",
        "**License:** to be filled in",
    ):
        assert words in card
