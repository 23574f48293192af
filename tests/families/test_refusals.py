"""Families that do not fit their latents are refused before anything is loaded or written."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from shards.base.errors import RequestError
from tests.families.small import Small
from train.config import TrainConfig
from train.prepare import prepare

FLUX = "flux1"
T5 = {"kind": "states", "towers": [["t5"]]}
CLIP_ALONE = {"encoder_hidden_states": {"kind": "states", "towers": [["clip_l", "clip_g"]]}}
SD3 = "StableDiffusion3Pipeline"


def refusal(small: Small, **changes: Any) -> str:
    """Return the error for a backbone with changed fields.

    Args:
        changes: fields of `backbone`; but `network` changes its JSON, and `data` the section of that name. An input of
            None is removed.
    """
    network, inputs, data = (changes.pop(name, {}) for name in ("network", "inputs", "data"))
    fields = small.train_fields(small.folder / "refused", data=data)
    backbone = fields["backbone"] | changes
    merged = backbone["inputs"] | inputs
    backbone["inputs"] = {name: value for name, value in merged.items() if value is not None}
    path = small.folder / "refused.json"
    path.write_text(json.dumps(json.loads((small.folder / "backbone.json").read_text()) | network))
    config = TrainConfig.model_validate(fields | {"backbone": backbone | {"config": path}})
    with pytest.raises(RequestError) as raised:
        prepare(config)
    assert not config.work.exists()
    return str(raised.value)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        (FLUX, {"data": {"towers": ["texts.clip"]}}, "they use the text tower t5, but the latents have clip"),
        (
            FLUX,
            {
                "inputs": {
                    "encoder_hidden_states": {"kind": "states"},
                    "pooled_projections": {"kind": "pooled", "towers": ["clipp"]},
                }
            },
            "they use the text tower clipp, but the latents have clip, t5",
        ),
        (
            FLUX,
            {"inputs": {"pooled_projections": {"kind": "pooled", "towers": ["t5"]}}},
            "pooled_projections uses the pooled output of t5, which was encoded without it",
        ),
        (
            FLUX,
            {"inputs": {"encoder_hidden_states": T5 | {"towers": [["clip"]]}}},
            "encoder_hidden_states uses the hidden states of clip, which was encoded without them",
        ),
        (
            "sd3",
            {"inputs": {"encoder_hidden_states": T5 | {"towers": [["clip_l", "t5"]]}}},
            "padding): {'clip_l': (16, False), 't5': (24, False)}",
        ),
        (
            FLUX,
            {"network": {"joint_attention_dim": 16}},
            "of width 16, but the text latents have width 12. Set `backbone.config` to a network that fits",
        ),
        (
            FLUX,
            {"network": {"pooled_projection_dim": 8}},
            "it takes pooled outputs of width 8, but the text towers provide width 16",
        ),
        (FLUX, {"pack": 1}, "it maps 16 to 16 channels, but the latents have 4"),
        (
            FLUX,
            {"network": {"in_channels": 36}, "pack": 3},
            "its patches are 3 × 3, but the latents of bucket 64x64 are (8, 8)",
        ),
        ("sd3", {"network": {"patch_size": 3}}, "its patches are 3 × 3, but the latents of bucket 64x64 are (8, 8)"),
        ("sd3", {"network": {"pos_embed_max_size": 2}}, "cannot call it on latents of size (8, 8): ValueError: Height"),
        (
            "pixart-sigma",
            {"further_channels": False},
            "it maps 4 to 8 channels, but the latents have 4 (to ignore the additional output channels, set backbone.f",
        ),
        ("pixart-sigma", {"network": {"out_channels": 4}}, "it maps 4 to 4 channels, but the latents have 4"),
        (
            "prx",
            {"inputs": {"encoder_hidden_states": {"kind": "states", "towers": [["t5gemma"]]}}},
            "captions for t5gemma were encoded with `masked` or `trim`, which hides padding, but backbone.inputs gives",
        ),
        (
            FLUX,
            {"inputs": {"pooled": {"kind": "pooled", "towers": ["clip"]}}},
            "backbone.inputs names the argument pooled, which the network lacks (it has",
        ),
        (FLUX, {"inputs": {"guidance": None}}, "with guidance_embeds True, it requires the input guidance, which"),
        (FLUX, {"inputs": {"img_ids": None}}, "it requires the input img_ids, which backbone.inputs does not name"),
        (
            FLUX,
            {"network": {"guidance_embeds": False}},
            "diffusers cannot call it on latents of size (8, 8): TypeError",
        ),
        (
            "sdxl",
            {"inputs": {"added_cond_kwargs.time_ids": None}},
            "cannot call it on latents of size (8, 8): ValueError",
        ),
        (
            FLUX,
            {"network": {"_class_name": "FluxTransformer2D"}},
            "(did you mean FluxTransformer2DModel?), which this trainer",
        ),
        (FLUX, {"network": {"_class_name": "AutoencoderKL"}}, "is AutoencoderKL, which this trainer does not support"),
        (FLUX, {"network": {"num_layerz": 9}}, "has the field num_layerz (did you mean num_layers?), which diffusers'"),
        ("pixart-sigma", {"network": {"patch_size": 0}}, "cannot build PixArtTransformer2DModel from"),
        ("sdxl", {"network": {"transformer_layers_per_block": [1]}}, "cannot build UNet2DConditionModel from"),
        (
            "pixart-sigma",
            {"inputs": {"encoder_hidden_states": {"kind": "states", "towers": [["t5"]], "mask": "timestep"}}},
            "backbone.inputs names the argument timestep, which the trainer sets itself",
        ),
        (
            FLUX,
            {"pipeline": {"class_name": "FluxPipeline", "towers": ["clip", "t6"]}},
            "backbone.pipeline.towers names t6, but the latents have clip, t5",
        ),
        (FLUX, {"pipeline": {"class_name": "FluxPipelin"}}, "has no class of this name (did you mean FluxPipeline?)"),
        (
            FLUX,
            {"pipeline": {"class_name": "FluxPipeline", "towers": ["clip"]}},
            "(text_encoder, text_encoder_2), but backbone.pipeline.towers names 1 text tower.",
        ),
        (
            "sd3",
            {"network": {"joint_attention_dim": 36}, "inputs": CLIP_ALONE},
            "backbone.pipeline.towers names t5, which backbone.inputs does not read",
        ),
        (
            "sd3",
            {
                "network": {"joint_attention_dim": 36},
                "inputs": CLIP_ALONE,
                "pipeline": {"class_name": SD3, "towers": ["clip_l", "clip_g"]},
            },
            "(text_encoder, text_encoder_2, text_encoder_3), but backbone.pipeline.towers names 2 text towers.",
        ),
        (
            "sd3",
            {"pipeline": {"class_name": SD3, "towers": ["clip_l", "clip_l", "t5"]}},
            "backbone.inputs reads clip_g, which backbone.pipeline.towers does not name",
        ),
        (
            FLUX,
            {"pipeline": {"scheduler": "FlowMatchEuler"}},
            "The scheduler FlowMatchEuler (backbone.pipeline.scheduler) cannot be built with the settings {}",
        ),
        (
            "sd3",
            {"inputs": {"pooled_projections": {"kind": "pooled", "towers": ["clip_g", "clip_l"]}}},
            "backbone.inputs.pooled_projections reads clip_g, clip_l in this order, but StableDiffusion3Pipeline would",
        ),
        (
            "sd3",
            {"inputs": {"encoder_hidden_states": {"kind": "states", "towers": [["t5"], ["clip_l", "clip_g"]]}}},
            "would feed the network clip_l, clip_g, t5, the order of backbone.pipeline.towers",
        ),
        (
            "sd3",
            {"pipeline": {"class_name": SD3, "towers": ["clip_g", "clip_l", "t5"]}},
            "backbone.inputs.encoder_hidden_states reads clip_l, clip_g, t5 in this order",
        ),
        (FLUX, {"time_divisor": 1}, "time_divisor is 1, but FluxPipeline divides timesteps by 1000"),
        ("sd3", {"time_divisor": 1000}, "StableDiffusion3Pipeline divides timesteps by 1, so"),
        ("sdxl", {"dropped": "empty"}, "StableDiffusionXLPipeline uses zeros as its unconditional input"),
        (FLUX, {"dropped": "zeros"}, "FluxPipeline uses the empty caption as its unconditional input"),
    ],
)
def test_what_does_not_fit_is_said(
    name: str, changes: dict[str, Any], words: str, small: Callable[[str], Small]
) -> None:
    message = refusal(small(name), **changes)
    assert words in message and "\n" not in message


def test_a_network_must_be_named() -> None:
    fields = {"run_dir": "r", "max_steps": 1, "data": {"streams": [{"root": "r", "bucket": "64x64"}]}}
    with pytest.raises(ValueError, match=r"`backbone\.config` is missing"):
        TrainConfig.model_validate(fields)


def test_inputs_have_one_kind_of_states() -> None:
    inputs = {"guidance": {"kind": "guidance"}}
    with pytest.raises(ValueError, match="inputs must contain exactly one input of kind `states`"):
        TrainConfig.model_validate({"backbone": {"inputs": inputs}})


def test_a_precision_in_which_a_network_overflows_is_refused(small: Callable[[str], Small]) -> None:
    fields = small("sana").train_fields(small("sana").folder / "float16", precision="float16")
    config = TrainConfig.model_validate(fields)
    with pytest.raises(
        RequestError, match=r"precision float16 does not work for Sana.*: autocast converts the float32 sums"
    ):
        prepare(config)
    assert not config.work.exists()
