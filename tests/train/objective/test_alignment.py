"""REPA, compared with the paper in float64, and in whole runs: kills, ranks, buckets, sharding, compilation."""

import json
import math
import shutil
import weakref
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers import FluxTransformer2DModel, SD3Transformer2DModel
from safetensors.torch import load_file
from torch import nn

from bench.kit.roots import feature_tower, make_root
from shards.base.errors import RequestError, exit_code_of
from shards.format.buckets import Bucket
from shards.format.text import quantise
from tests import ranks
from tests.runs import ONE_LEVEL_UNET, TRANSFORMER, UNET, column, curve, train_fields, write_config
from tests.train.specs import CHANNELS, TOKENS, WIDTH, Answer, make_batch, spec
from train.__main__ import run as command
from train.config import TrainConfig
from train.data.draws import Draws
from train.model.network import build_network, compile_network
from train.objective.alignment import (
    Aligned,
    StoredFeatures,
    find_features,
    layer_shape,
    make_head,
    negative_cosine,
    resize_tokens,
    token_grid,
)
from train.objective.config import ObjectiveConfig, RepaConfig
from train.objective.loss import DiffusionLoss
from train.prepare import prepare
from train.run.checkpoints.checkpoint import HEAD_NAME, newest_checkpoint, step_folder
from train.run.reporting.json_lines import read_json_lines

pytestmark = pytest.mark.heavy

FEATURES = 10
TOWER = feature_tower(FEATURES)
"""A tower that resizes 64x64 pictures to 56x56, which gives 4x4 tokens."""
OF = StoredFeatures("dino", TOWER, 8)
LAYER = "transformer_blocks.0"
UNET_LAYER = "down_blocks.1"
INNER_LAYER = "down_blocks.0.attentions.0.transformer_blocks.0"
"""A layer inside a block, which gradient checkpointing computes again."""
WEIGHTS = "diffusion_pytorch_model.safetensors"


def cosine_loop(projected: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """Return −mean over patches of ⟨a, b⟩ / (|a|·|b|) in float64, patch by patch: (N,)."""
    losses = []
    for a, b in zip(projected.double(), features.double(), strict=True):
        cosines = [float(x @ y) / math.sqrt(float(x @ x) * float(y @ y)) for x, y in zip(a, b, strict=True)]
        losses.append(-sum(cosines) / len(cosines))
    return torch.tensor(losses, dtype=torch.float64)


def test_the_loss_is_the_papers() -> None:
    projected, features = torch.randn(3, 16, FEATURES), 5 * torch.randn(3, 16, FEATURES)
    found = negative_cosine(projected, features)
    torch.testing.assert_close(found.double(), cosine_loop(projected, features), rtol=1e-5, atol=1e-6)
    normalised = -(F.normalize(projected, dim=-1) * F.normalize(features, dim=-1)).sum(-1).mean(-1)  # as in REPA's code
    torch.testing.assert_close(found, normalised)
    assert negative_cosine(features, 0.1 * features).allclose(-torch.ones(3))


class Toy(nn.Module):
    """A network whose hidden layer returns (N, C, h/2, w/2), with a second module that receives it as tokens."""

    def __init__(self, as_tokens: bool) -> None:
        super().__init__()
        self.layer = nn.Conv2d(CHANNELS, 6, 2, stride=2)
        self.tokens = nn.Identity()
        self.last = nn.Linear(1, 1)
        self.as_tokens = as_tokens

    def forward(self, noisy: torch.Tensor, *_: Any, **__: Any) -> object:
        hidden = self.layer(noisy)
        self.tokens(hidden.flatten(2).transpose(1, 2))
        return Answer((0.5 * noisy + hidden.mean(),))


@pytest.mark.parametrize("storage", ["float16", "float8"])
@pytest.mark.parametrize("layer", ["layer", "tokens"])
@pytest.mark.parametrize("hw", [(8, 8), (16, 8), (8, 24)])
def test_a_batch_on_paper(hw: tuple[int, int], layer: str, storage: str) -> None:
    """Compare with the whole computation in float64: resizing, head, cosine and coefficient, for several grids."""
    config = RepaConfig(layer=layer, weight=0.7, until=10, schedule="linear", hidden=12)
    network = Toy(layer == "tokens")
    shapes = {hw: layer_shape(network, config, lambda: network(torch.zeros(1, CHANNELS, *hw)))}
    aligned = Aligned(network, make_head(config, shapes, FEATURES, seed=0), config, OF)
    grid = TOWER.grid(Bucket(hw[1] * 8, hw[0] * 8))
    features, stored = torch.randn(5, math.prod(grid), FEATURES), torch.randn(5, CHANNELS, *hw).half()
    data = make_batch(list("abcde"), torch.arange(5), stored, torch.randn(5, TOKENS, WIDTH).half())
    data.columns["features.dino"] = features.half()
    if storage == "float8":
        data.columns["features.dino"], data.columns["feature_scales.dino"] = quantise(features)
        features = data.columns["features.dino"].view(torch.float8_e4m3fn).float()
        features *= data.columns["feature_scales.dino"].float().unsqueeze(-1)
    loss = DiffusionLoss(ObjectiveConfig(), spec(posterior="mean"), torch.device("cpu"), aligned=aligned)
    found = loss(aligned, loss.add_noise(data, Draws(0, 4, data.slots)))

    seen = []
    handle = network.layer.register_forward_hook(lambda module, inputs, output: seen.append(output.detach()))
    plain = DiffusionLoss(ObjectiveConfig(), spec(posterior="mean"), torch.device("cpu"))
    expected = plain(network, plain.add_noise(data, Draws(0, 4, data.slots)))
    handle.remove()
    hidden = seen[0].double().permute(0, 2, 3, 1).reshape(5, -1, 6)
    first, second, third = (module.double() for module in aligned.head.children() if isinstance(module, nn.Linear))
    silu = lambda x: x / (1 + (-x).exp())  # noqa: E731
    projected = third(silu(second(silu(first(hidden))))).detach()
    planes = features.half().double() if storage == "float16" else features.double()
    target = F.interpolate(
        planes.transpose(1, 2).reshape(5, FEATURES, *grid),
        size=(hw[0] // 2, hw[1] // 2),
        mode="bilinear",
        antialias=True,
    )
    reference = cosine_loop(projected, target.flatten(2).transpose(1, 2))
    assert found.aligned is not None
    torch.testing.assert_close(found.aligned.detach().double(), reference, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.per_sample, expected.per_sample, rtol=0, atol=0)
    torch.testing.assert_close(
        found.total.detach().double(),
        expected.per_sample.detach().double() + 0.7 * 0.6 * reference,
        rtol=1e-4,
        atol=1e-5,
    )
    with torch.no_grad():
        aligned(stored.float())
    assert not hasattr(aligned, "projected") and not aligned.layer.outputs


def test_features_are_resized_as_pictures_are() -> None:
    """Antialiased bilinear resizing to half weights four neighbours by 1, 3, 3, 1 over 8, away from the border."""
    features = torch.randn(1, 64, 1, dtype=torch.float64)
    planes = features.reshape(8, 8)
    found = resize_tokens(features, (8, 8), (4, 4)).reshape(4, 4)
    weights = torch.tensor([1.0, 3.0, 3.0, 1.0], dtype=torch.float64) / 8
    for y in (1, 2):
        for x in (1, 2):
            patch = planes[2 * y - 1 : 2 * y + 3, 2 * x - 1 : 2 * x + 3]
            assert float(found[y, x]) == pytest.approx(float(weights @ patch @ weights))
    assert resize_tokens(features, (8, 8), (8, 8)) is features


@pytest.mark.parametrize(
    ("tokens", "hw", "grid"),
    [
        (64, (8, 8), (8, 8)),
        (16, (8, 8), (4, 4)),
        (24, (24, 16), (6, 4)),
        (96, (16, 24), (8, 12)),
        (17, (8, 8), None),  # a class token
        (32, (8, 8), None),
        (0, (8, 8), None),
    ],
)
def test_grids(tokens: int, hw: tuple[int, int], grid: tuple[int, int] | None) -> None:
    assert token_grid(tokens, hw) == grid


def test_finding_a_layers_shape_leaves_no_hook() -> None:
    network, latents = Toy(as_tokens=False), torch.zeros(1, CHANNELS, 8, 8)
    layer_shape(network, RepaConfig(layer="layer"), lambda: network(latents))
    output = weakref.ref(network.layer(latents))
    assert output() is None  # a hook would keep it


def test_layers_of_transformers_can_be_aligned() -> None:
    """Align the image tokens of blocks that return text tokens first: SD3 and FLUX.1 on 8x8 latents."""
    with torch.device("meta"):
        sd3 = SD3Transformer2DModel(
            sample_size=8, num_layers=2, attention_head_dim=4, num_attention_heads=2, joint_attention_dim=6,
            caption_projection_dim=8, pooled_projection_dim=6, pos_embed_max_size=8,
        )  # fmt: skip
        flux = FluxTransformer2DModel(
            in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
            joint_attention_dim=6, pooled_projection_dim=6, axes_dims_rope=(4, 4, 8),
        )  # fmt: skip
        text, pooled, time = torch.zeros(1, 5, 6), torch.zeros(1, 6), torch.zeros(1)
        ids = {"txt_ids": torch.zeros(5, 3), "img_ids": torch.zeros(16, 3)}
        found = [
            layer_shape(model, RepaConfig(layer="transformer_blocks.0", output=1), call)
            for model, call in (
                (sd3, lambda: sd3(torch.zeros(1, 16, 8, 8), text, pooled, time)),
                (flux, lambda: flux(torch.zeros(1, 16, 16), text, pooled, time, **ids)),
            )
        ]
    assert found == [(1, 16, 8), (1, 16, 32)] and token_grid(16, (8, 8)) == (4, 4)


def test_a_layer_inside_a_compiled_and_checkpointed_block_of_a_transformer(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sana = {
        "_class_name": "SanaTransformer2DModel", "in_channels": 4, "out_channels": 4, "caption_channels": 16,
        "attention_head_dim": 4, "num_attention_heads": 2, "cross_attention_head_dim": 4,
        "num_cross_attention_heads": 2, "cross_attention_dim": 8, "num_layers": 2,
    }  # fmt: skip
    (tmp_path / "backbone.json").write_text(json.dumps(sana))
    backbone = {"config": str(tmp_path / "backbone.json")}
    changes = {"backbone": backbone, "compile": True, "gradient_checkpointing": True}
    fields = fields_of(root, tmp_path / "run", repa={"layer": "transformer_blocks.1.attn1"}, **changes)
    assert exit_code_of(lambda: command(["check", "--config", str(write_config(tmp_path, fields))])) == 2
    assert "repa.layer transformer_blocks.1.attn1 is inside the block transformer_blocks.1" in capsys.readouterr().err
    config = write_config(tmp_path, fields | {"gradient_checkpointing": 0.5})
    assert exit_code_of(lambda: command(["check", "--config", str(config)])) == 0


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {0: 0.5, 10**6: 0.5}),
        ({"weight": 0.2, "until": 100}, {0: 0.2, 99: 0.2, 100: 0.0, 101: 0.0}),
        ({"until": 100, "schedule": "linear"}, {0: 0.5, 50: 0.25, 99: 0.005, 100: 0.0, 200: 0.0}),
    ],
)
def test_the_coefficient(fields: dict[str, Any], expected: dict[int, float]) -> None:
    assert {step: RepaConfig(**fields).coefficient(step) for step in expected} == pytest.approx(expected)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    buckets = {"64x64": [13, 11], "128x64": [9, 8]}
    return make_root(tmp_path_factory.mktemp("roots") / "root", buckets, features={"dino": TOWER})


def fields_of(root: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    """Return the config of a run over two buckets that aligns the network's only block."""
    streams = [{"root": str(root), "bucket": bucket} for bucket in ("64x64", "128x64")]
    repa = {"layer": LAYER, "hidden": 24, "until": 3, "schedule": "linear"}
    # Validates the average without gradients, so without the head. One of two ranks repeats the last of three batches.
    validation = {"root": str(root), "bucket": "64x64", "samples": 10, "batch_size": 4, "every": 4, "weights": "ema"}
    fields: dict[str, Any] = {"data": {"streams": streams}, "repa": repa, "max_steps": 4, "optimizer": {"lr": 1e-3}}
    fields |= {"ema": {"snapshot_every": 4}, "validation": validation, "collective_timeout": 120.0}
    return train_fields(root, folder, **fields | changes)


def train(folder: Path, root: Path, name: str, **changes: Any) -> Path:
    """Train in this process and return the run folder."""
    command(["--config", str(write_config(folder, fields_of(root, folder / name, **changes)))])
    return folder / name


@pytest.fixture(scope="module")
def whole(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("whole"), root, "run")


def test_a_run_aligns_and_says_so(whole: Path) -> None:
    assert column(whole, "repa_weight") == pytest.approx([0.5 * (1 - k / 3) for k in range(3)] + [0.0])
    losses = column(whole, "repa_loss")
    assert len(losses) == len(set(losses)) == 4 and all(-1 < loss < 1 for loss in losses)
    newest = newest_checkpoint(whole)
    assert newest is not None
    head = load_file(newest.folder / HEAD_NAME)
    assert {name: tuple(value.shape) for name, value in head.items() if "weight" in name} == {
        "0.weight": (24, 16), "2.weight": (24, 24), "4.weight": (FEATURES, 24),
    }  # fmt: skip
    assert newest.fingerprint["repa"]["tower"] == "dino" and newest.fingerprint["repa"]["layer"] == LAYER
    optimizer = load_file(newest.folder / "optimizer.safetensors")
    assert optimizer["exp_avg/repa.0.weight"].shape == (24, 16)
    # weights to export contain only the network, under its own names
    network = build_network(TRANSFORMER, None)
    for folder in ("unet", "ema"):
        saved = load_file(newest.folder / folder / WEIGHTS)
        assert saved.keys() == network.state_dict().keys()


def test_killed_and_resumed_it_is_bit_equal(whole: Path, root: Path, tmp_path: Path) -> None:
    for max_steps in (3, 4):
        train(tmp_path, root, "run", max_steps=max_steps)
        if max_steps == 3:  # as after a kill between step 3's log line and its checkpoint
            shutil.rmtree(step_folder(tmp_path / "run", 3))
    assert curve(tmp_path / "run") == curve(whole)
    assert column(tmp_path / "run", "repa_loss") == column(whole, "repa_loss")
    a, b = newest_checkpoint(tmp_path / "run"), newest_checkpoint(whole)
    assert a is not None and b is not None and a.content["files"] == b.content["files"]
    with pytest.raises(RequestError, match=r"trained with different settings: repa.until: 3 ≠ 7 \("):
        train(tmp_path, root, "run", repa={"layer": LAYER, "hidden": 24, "until": 7, "schedule": "linear"})


@pytest.mark.parametrize("sharding", ["none", "full"])
def test_two_ranks_and_other_microbatches_give_the_curve(
    whole: Path, root: Path, tmp_path: Path, sharding: str
) -> None:
    fields = fields_of(root, tmp_path / "run", microbatch_size=2, sharding=sharding)
    ranks.run(tmp_path / "log", ["--config", str(write_config(tmp_path, fields))], 2)
    assert curve(tmp_path / "run")[1] == curve(whole)[1]
    for field in ("loss", "repa_loss"):
        assert column(tmp_path / "run", field) == pytest.approx(column(whole, field), rel=1e-5)
    assert read_json_lines(tmp_path / "run" / "metrics.jsonl")[3]["val_loss"] == pytest.approx(
        read_json_lines(whole / "metrics.jsonl")[3]["val_loss"], rel=1e-5
    )
    for place, tolerance in ((HEAD_NAME, 1e-6), (f"../../posthoc/checkpoints/step-00000004/ema-0.050/{WEIGHTS}", 1e-4)):
        ones, twos = (load_file(step_folder(run, 4) / place) for run in (whole, tmp_path / "run"))
        assert ones.keys() == twos.keys()
        for name, value in ones.items():
            torch.testing.assert_close(twos[name], value, rtol=1e-3, atol=tolerance)


def test_the_next_phase_starts_with_the_head(whole: Path, root: Path, tmp_path: Path) -> None:
    config = TrainConfig.model_validate(fields_of(root, tmp_path / "next", init_from=str(whole)))
    aligned = prepare(config).aligned
    assert aligned is not None
    saved = load_file(step_folder(whole, 4) / HEAD_NAME)
    assert all(value.equal(saved[name]) for name, value in aligned.head.state_dict().items())


@pytest.mark.parametrize(
    ("how", "layer"),
    [
        ("gradient_checkpointing", UNET_LAYER),
        ("gradient_checkpointing", INNER_LAYER),
        ("both", INNER_LAYER),
        pytest.param("compile by block, half recomputed", INNER_LAYER, marks=pytest.mark.slow),
        pytest.param("compile", UNET_LAYER, marks=pytest.mark.slow),
        pytest.param("compile", INNER_LAYER, marks=pytest.mark.slow),
    ],
)
def test_compiled_or_computed_again_the_gradients_are_the_same(
    root: Path, tmp_path: Path, how: str, layer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare the gradients of network and head from both losses; Dynamo traces the hook."""
    gradients = []
    # only the partitioner chooses what to recompute, and it takes half of the time
    backend = "aot_eager_decomp_partition" if "half recomputed" in how else "aot_eager"
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend=backend))
    network = ONE_LEVEL_UNET if how == "both" else UNET
    repa = {"layer": layer, "hidden": 24}
    config = TrainConfig.model_validate(fields_of(root, tmp_path, repa=repa, backbone={"config": str(network)}))
    prepared = prepare(config)
    assert prepared.aligned is not None
    for on in (False, True):
        torch.manual_seed(0)
        unet = build_network(network, seed=3)
        prepared.aligned.head.zero_grad()
        aligned = Aligned(unet, prepared.aligned.head, config.repa, prepared.aligned.features)
        if on and how != "gradient_checkpointing":
            recomputed = 0.5 if how == "compile by block, half recomputed" else 0.0
            compile_network(unet, num_shapes=1, by_block=how != "compile", recomputed=recomputed)
        if on and how in ("gradient_checkpointing", "both"):
            unet.enable_gradient_checkpointing()
        loss = DiffusionLoss(config.objective, prepared.spec, torch.device("cpu"), aligned=aligned)
        data = make_batch(list("abcd"), torch.arange(4), torch.randn(4, 8, 8, 8).half(), torch.randn(4, 16, 16).half())
        data.columns["features.dino"] = torch.randn(4, 16, FEATURES).half()
        loss(aligned, loss.add_noise(data, Draws(0, 0, data.slots))).total.sum().backward()
        found = [parameter.grad for parameter in aligned.parameters()]
        assert all(gradient is not None for gradient in found)
        gradients.append(torch.cat([gradient.flatten() for gradient in found if gradient is not None]))
        assert not aligned.layer.outputs
        torch._dynamo.reset()
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("repa", "towers", "message"),
    [
        (
            {"layer": "transformer_block.0"},
            None,
            r"repa\.layer transformer_block\.0 is not a module .* nearest names are transformer_blocks\.0, ",
        ),
        (
            {"layer": LAYER, "tower": "dino"},
            ["texts.text"],
            r"data\.towers excludes it\. Add features\.dino to data\.towers",
        ),
    ],
)
def test_wrong_requests(
    root: Path, tmp_path: Path, repa: dict[str, Any], towers: list[str] | None, message: str
) -> None:
    fields = fields_of(root, tmp_path / "run", repa=repa)
    fields["data"]["towers"] = towers
    with pytest.raises(RequestError, match=message):
        command(["check", "--config", str(write_config(tmp_path, fields))])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("repa", "message"),
    [
        # five names at most, the nearest first
        ({"layer": "down_block.1"}, r"is not a module .* nearest names are down_blocks\.1(, [a-z_0-9.]+){1,4}\. "),
        ({"layer": "!"}, r"repa\.layer ! is not a module .* nearest names are [a-z_0-9.]+(, [a-z_0-9.]+){9,}\. "),
        ({"layer": "time_embedding"}, r"has shape \(1, 64\) for latents of 8x8\. Alignment needs"),
        ({"layer": UNET_LAYER, "output": 1}, r"returned Tensor, tuple\. Alignment needs .* output 1 is a tensor"),
        ({"layer": UNET_LAYER, "output": 2}, r"returned Tensor, tuple\. Alignment needs .* output 2 is a tensor"),
    ],
)
def test_wrong_layers(repa: dict[str, Any], message: str) -> None:
    unet: Any = build_network(UNET, 0)
    inputs = torch.zeros(1, 4, 8, 8), torch.zeros(1), torch.zeros(1, 2, unet.config.cross_attention_dim)
    with pytest.raises(RequestError, match=message):
        make_head(RepaConfig(**repa), {(8, 8): layer_shape(unet, RepaConfig(**repa), lambda: unet(*inputs))}, 1, 0)


def test_the_linear_schedule_needs_an_end() -> None:
    with pytest.raises(ValueError, match="the linear schedule needs `until`"):
        RepaConfig(layer=LAYER, schedule="linear")


def test_a_root_without_features(latents: Path, tmp_path: Path) -> None:
    fields = train_fields(latents, tmp_path / "run", repa={"layer": LAYER})
    with pytest.raises(RequestError, match=r"the run reads none\. Set repa\.tower to one of .*\(none\)"):
        command(["check", "--config", str(write_config(tmp_path, fields))])


@pytest.mark.parametrize(
    ("tower", "read", "message"),
    [
        ("dion", ["dino"], r"The root has no feature tower dion \(did you mean dino\?\); it has dino, siglip\. "),
        (None, [], r"needs one feature tower, but the run reads none.*feature towers \(dino, siglip"),
        (None, ["dino", "siglip"], r"the run reads dino and siglip\. Set repa\.tower"),
    ],
)
def test_wrong_towers(tower: str | None, read: list[str], message: str) -> None:
    data = spec()
    data.features.update(dict.fromkeys(read, TOWER))
    with pytest.raises(RequestError, match=message):
        find_features(RepaConfig(layer=LAYER, tower=tower), data, ["dino", "siglip"])


def test_one_of_several() -> None:
    data = spec()
    data.features.update(dino=TOWER, siglip=TOWER)
    assert find_features(RepaConfig(layer=LAYER, tower="siglip"), data, ["dino", "siglip"]).name == "siglip"
