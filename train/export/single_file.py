"""Single safetensors files of a whole pipeline, in the layout that ComfyUI and AUTOMATIC1111 load.

The layout is that of each model's original release, which diffusers' `from_single_file` also reads. The tables below
are the inverse of diffusers' own conversions (diffusers/loaders/single_file_utils.py), by class.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import CLIPTextConfig

from shards.base.durable import new_file
from shards.base.errors import RequestError
from train.model.tensors import file_header, file_of, file_order, load_tensors, tensor_bytes
from train.objective.config import ObjectiveConfig

Weights = dict[str, Tensor]
Rule = tuple[str, str | Callable[[re.Match[str]], str]]
"""Pattern that matches a whole key of diffusers or transformers, and its replacement."""

NETWORK = "model.diffusion_model."
HASH = "modelspec.hash_sha256"
MADE_BY = {"format": "pt", "latentmill": "single-file"}
"""Metadata of every file that this module writes."""
SCHEDULE: dict[str, Any] = {
    "num_train_timesteps": 1000,
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "beta_end": 0.012,
}
"""Stable Diffusion's noise schedule, which user interfaces assume for every U-Net."""
FLOW_SCHEDULE: dict[str, Any] = {"num_train_timesteps": 1000}
"""Settings of flow matching that user interfaces assume for every transformer."""
PREDICTION_TYPES = {"epsilon": "epsilon", "v_prediction": "v"}
"""Predictions for which user interfaces can sample from a U-Net, and their names in modelspec."""


def write_single_file(pipeline: Path, target: Path, metadata: Mapping[str, str], dtype: torch.dtype) -> None:
    """Write all weights of a pipeline folder to one file, flushed to disk. The same weights give the same bytes.

    Args:
        metadata: fields of the file's header in addition to the hash, from `modelspec`.
        dtype: data type of all floating-point weights.

    Raises:
        RequestError: the pipeline's class has no such layout, or a weight is too large for `dtype`.
        OSError: the file cannot be written, for example because the disk is full.
    """
    weights = single_file_weights(pipeline, dtype)
    order, digest = file_order(weights), hashlib.sha256()
    for name in order:
        digest.update(tensor_bytes(weights[name]))
    fields = {**metadata, **MADE_BY, HASH: f"0x{digest.hexdigest()}"}
    with new_file(target) as file:
        file.write(file_header({name: weights[name] for name in order}, dict(sorted(fields.items()))))
        file.writelines(tensor_bytes(weights[name]) for name in order)


def is_single_file(path: Path) -> bool:
    """Return whether `write_single_file` wrote a file."""
    try:
        with safe_open(path, "pt") as file:
            return MADE_BY.items() <= (file.metadata() or {}).items()
    except (OSError, SafetensorError):
        return False


def single_file_weights(pipeline: Path, dtype: torch.dtype | None = None) -> Weights:
    """Return the weights of a pipeline folder under the names of the original layout.

    Args:
        dtype: data type of all floating-point weights; None: as stored.

    Raises:
        RequestError: the pipeline's class has no such layout, or a weight is too large for `dtype`.
    """
    index = json.loads((pipeline / "model_index.json").read_text())
    layout = layout_of(index["_class_name"])
    found: Weights = {}
    for name, value in index.items():
        if name in layout.components and isinstance(value, list) and value[1]:
            component = Component.load(pipeline / name)
            prefix, convert = layout.components[name]
            prefix = prefix(component) if callable(prefix) else prefix
            found |= {prefix + key: cast(f"{name}: {key}", w, dtype) for key, w in convert(component).items()}
    scheduler = json.loads((pipeline / "scheduler" / "scheduler_config.json").read_text())
    return found | layout.marks(scheduler)


def cast(name: str, value: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Convert a floating-point weight to `dtype`.

    Raises:
        RequestError: a finite number would become infinite.
    """
    if dtype is None or not value.is_floating_point():
        return value.contiguous()
    found = value.to(dtype).contiguous()
    if not found.isfinite().all() and value.isfinite().all():
        raise RequestError(f"{name} has values that overflow {dtype}. Export with --dtype bfloat16.")
    return found


@dataclass(frozen=True)
class Component:
    """The weights and the config of one component of a pipeline."""

    weights: Weights
    config: dict[str, Any]

    @classmethod
    def load(cls, folder: Path) -> "Component":
        """Load a component's safetensors files, which may be sharded."""
        config = json.loads((folder / "config.json").read_text())
        paths = (file_of(folder / name) for name in ("diffusion_pytorch_model.safetensors", "model.safetensors"))
        return cls(load_tensors(next(path for path in paths if path.is_file())), config)


# renaming


def renamed(weights: Weights, rules: Iterable[Rule]) -> Weights:
    """Rename all keys by the first rule that matches.

    Raises:
        RequestError: no rule matches a key, so the layout has no place for that weight.
    """
    compiled = [(re.compile(pattern), replacement) for pattern, replacement in rules]
    found: Weights = {}
    for key, value in weights.items():
        for pattern, replacement in compiled:
            if match := pattern.fullmatch(key):
                found[match.expand(replacement) if isinstance(replacement, str) else replacement(match)] = value
                break
        else:
            raise RequestError(
                f"The single-file layout has no place for the weight {key}. Export the pipeline as a folder instead."
            )
    return found


def joined(weights: Weights, pattern: str, parts: tuple[str, ...]) -> Weights:
    """Concatenate weights whose keys differ only in one part, such as queries, keys and values.

    Args:
        pattern: pattern of the keys, in which the group `part` matches one of `parts`. The concatenated weight has
            the name of the first part's.
    """
    compiled, found = re.compile(pattern), dict(weights)
    for key in weights:
        match = compiled.fullmatch(key)
        if match and match["part"] == parts[0]:
            start, end = match.span("part")
            found[key] = torch.cat([found.pop(key[:start] + part + key[end:]) for part in parts])
    return found


def join_attention(weights: Weights, block: str) -> Weights:
    """Concatenate the queries, keys and values of the image's tokens, and those of the text's, in blocks `block`."""
    weights = joined(weights, block + r"attn2?\.(?P<part>to_[qkv])\.(weight|bias)", ("to_q", "to_k", "to_v"))
    text = ("add_q_proj", "add_k_proj", "add_v_proj")
    return joined(weights, block + r"attn\.(?P<part>add_\w_proj)\.(weight|bias)", text)


def swap_halves(weights: Weights, layer: str) -> None:
    """Exchange the halves of a modulation's output: diffusers computes (scale, shift), the originals (shift, scale)."""
    for key in (f"{layer}.weight", f"{layer}.bias"):
        weights[key] = torch.cat(weights[key].chunk(2)[::-1])


# Stable Diffusion's U-Nets and VAEs

RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}


def unet(component: Component) -> Weights:
    """Convert a UNet2DConditionModel."""
    per_block = component.config["layers_per_block"]
    if not isinstance(per_block, int):
        raise RequestError(
            f"The single-file layout needs the same number of layers in all blocks of a U-Net, but layers_per_block is "
            f"{per_block}. Export the pipeline as a folder instead."
        )
    has_attention = ["Attn" in kind for kind in component.config["up_block_types"]]

    def resnet(prefix: str, rest: str) -> str:
        layer, _, name = rest.partition(".")
        return f"{prefix}.{RESNET[layer]}.{name}"

    def input_block(match: re.Match[str]) -> int:
        return (per_block + 1) * int(match[1]) + int(match[2]) + 1

    def output_block(match: re.Match[str]) -> int:
        return (per_block + 1) * int(match[1]) + int(match[2])

    def upsampler(match: re.Match[str]) -> str:
        block = int(match[1])
        return f"output_blocks.{(per_block + 1) * block + per_block}.{2 if has_attention[block] else 1}.conv.{match[2]}"

    return renamed(
        component.weights,
        [
            (r"time_embedding\.linear_1\.(.*)", r"time_embed.0.\1"),
            (r"time_embedding\.linear_2\.(.*)", r"time_embed.2.\1"),
            (r"add_embedding\.linear_1\.(.*)", r"label_emb.0.0.\1"),
            (r"add_embedding\.linear_2\.(.*)", r"label_emb.0.2.\1"),
            (r"conv_in\.(.*)", r"input_blocks.0.0.\1"),
            (r"conv_norm_out\.(.*)", r"out.0.\1"),
            (r"conv_out\.(.*)", r"out.2.\1"),
            (r"down_blocks\.(\d+)\.resnets\.(\d+)\.(.*)", lambda m: resnet(f"input_blocks.{input_block(m)}.0", m[3])),
            (r"down_blocks\.(\d+)\.attentions\.(\d+)\.(.*)", lambda m: f"input_blocks.{input_block(m)}.1.{m[3]}"),
            (
                r"down_blocks\.(\d+)\.downsamplers\.0\.conv\.(.*)",
                lambda m: f"input_blocks.{(per_block + 1) * (int(m[1]) + 1)}.0.op.{m[2]}",
            ),
            (r"mid_block\.resnets\.(\d)\.(.*)", lambda m: resnet(f"middle_block.{2 * int(m[1])}", m[2])),
            (r"mid_block\.attentions\.0\.(.*)", r"middle_block.1.\1"),
            (r"up_blocks\.(\d+)\.resnets\.(\d+)\.(.*)", lambda m: resnet(f"output_blocks.{output_block(m)}.0", m[3])),
            (r"up_blocks\.(\d+)\.attentions\.(\d+)\.(.*)", lambda m: f"output_blocks.{output_block(m)}.1.{m[3]}"),
            (r"up_blocks\.(\d+)\.upsamplers\.0\.conv\.(.*)", upsampler),
        ],
    )


def vae(component: Component) -> Weights:
    """Convert an AutoencoderKL, whose attention layers are 1 × 1 convolutions in the original."""
    last = len(component.config["block_out_channels"]) - 1
    middle = r"(encoder|decoder)\.mid_block\."
    found = renamed(
        {key.replace("conv_shortcut", "nin_shortcut"): value for key, value in component.weights.items()},
        [
            (r"encoder\.down_blocks\.(\d+)\.resnets\.(\d+)\.(.*)", r"encoder.down.\1.block.\2.\3"),
            (r"encoder\.down_blocks\.(\d+)\.downsamplers\.0\.(.*)", r"encoder.down.\1.downsample.\2"),
            (
                r"decoder\.up_blocks\.(\d+)\.resnets\.(\d+)\.(.*)",
                lambda m: f"decoder.up.{last - int(m[1])}.block.{m[2]}.{m[3]}",
            ),
            (
                r"decoder\.up_blocks\.(\d+)\.upsamplers\.0\.(.*)",
                lambda m: f"decoder.up.{last - int(m[1])}.upsample.{m[2]}",
            ),
            (middle + r"resnets\.0\.(.*)", r"\1.mid.block_1.\2"),
            (middle + r"resnets\.1\.(.*)", r"\1.mid.block_2.\2"),
            # older files have the second names
            (middle + r"attentions\.0\.group_norm\.(.*)", r"\1.mid.attn_1.norm.\2"),
            (middle + r"attentions\.0\.(?:to_q|query)\.(.*)", r"\1.mid.attn_1.q.\2"),
            (middle + r"attentions\.0\.(?:to_k|key)\.(.*)", r"\1.mid.attn_1.k.\2"),
            (middle + r"attentions\.0\.(?:to_v|value)\.(.*)", r"\1.mid.attn_1.v.\2"),
            (middle + r"attentions\.0\.(?:to_out\.0|proj_attn)\.(.*)", r"\1.mid.attn_1.proj_out.\2"),
            (r"(encoder|decoder)\.conv_norm_out\.(.*)", r"\1.norm_out.\2"),
            (r"((?:encoder|decoder)\.conv_(?:in|out)\..*)", r"\1"),
            (r"((?:post_)?quant_conv\..*)", r"\1"),
        ],
    )
    return {
        key: value[:, :, None, None] if ".attn_1." in key and value.ndim == 2 else value for key, value in found.items()
    }


# text encoders


def clip(component: Component) -> Weights:
    """Convert a CLIP text model to transformers' names within a module `text_model`. The folder may hold a whole CLIP
    model, whose other parts are left out."""
    parts = ("text_model.", "text_projection.")
    weights = {key: value for key, value in component.weights.items() if not key.endswith("position_ids")}
    if any(key.startswith("text_model.") for key in weights):
        return {key: value for key, value in weights.items() if key.startswith(parts)}
    return {key if key.startswith(parts) else f"text_model.{key}": value for key, value in weights.items()}


def open_clip(component: Component) -> Weights:
    """Convert a CLIP text model to OpenCLIP's names, in which queries, keys and values are one layer."""
    layer = r"text_model\.encoder\.layers\.(\d+)"
    parts = ("q_proj", "k_proj", "v_proj")
    one = joined(clip(component), layer + r"\.self_attn\.(?P<part>\w_proj)\.(weight|bias)", parts)
    found = renamed(
        one,
        [
            (r"text_model\.embeddings\.token_embedding\.weight", "token_embedding.weight"),
            (r"text_model\.embeddings\.position_embedding\.weight", "positional_embedding"),
            (r"text_model\.final_layer_norm\.(.*)", r"ln_final.\1"),
            (r"text_projection\.weight", "text_projection"),
            (layer + r"\.layer_norm(\d)\.(.*)", r"transformer.resblocks.\1.ln_\2.\3"),
            (layer + r"\.mlp\.fc1\.(.*)", r"transformer.resblocks.\1.mlp.c_fc.\2"),
            (layer + r"\.mlp\.fc2\.(.*)", r"transformer.resblocks.\1.mlp.c_proj.\2"),
            (layer + r"\.self_attn\.out_proj\.(.*)", r"transformer.resblocks.\1.attn.out_proj.\2"),
            (layer + r"\.self_attn\.q_proj\.(.*)", r"transformer.resblocks.\1.attn.in_proj_\2"),
        ],
    )
    if "text_projection" in found:
        found["text_projection"] = found["text_projection"].T
    return found


def is_open_clip(component: Component) -> bool:
    """Return whether a CLIP text model is one of OpenCLIP's. OpenAI's use an approximation of GELU."""
    config = component.config.get("text_config", component.config)
    return bool(config.get("hidden_act", "quick_gelu") != "quick_gelu")


def either_clip(component: Component) -> Weights:
    """Convert Stable Diffusion's only text encoder: OpenAI's in version 1, OpenCLIP's in version 2."""
    return open_clip(component) if is_open_clip(component) else clip(component)


def t5(component: Component) -> Weights:
    """Keep transformers' key names, and drop the decoder."""
    decoder = ("decoder.", "lm_head.")
    return {key: value for key, value in component.weights.items() if not key.startswith(decoder)}


# transformers


def sd3(component: Component) -> Weights:
    """Convert an SD3Transformer2DModel."""
    last = component.config["num_layers"] - 1
    block = r"transformer_blocks\.(\d+)\."
    found = renamed(
        join_attention(component.weights, block),
        [
            (r"pos_embed\.pos_embed", "pos_embed"),
            (r"pos_embed\.proj\.(.*)", r"x_embedder.proj.\1"),
            (r"time_text_embed\.timestep_embedder\.linear_1\.(.*)", r"t_embedder.mlp.0.\1"),
            (r"time_text_embed\.timestep_embedder\.linear_2\.(.*)", r"t_embedder.mlp.2.\1"),
            (r"time_text_embed\.text_embedder\.linear_1\.(.*)", r"y_embedder.mlp.0.\1"),
            (r"time_text_embed\.text_embedder\.linear_2\.(.*)", r"y_embedder.mlp.2.\1"),
            (r"(context_embedder\..*)", r"\1"),
            (block + r"(attn2?)\.to_q\.(.*)", r"joint_blocks.\1.x_block.\2.qkv.\3"),
            (block + r"attn\.add_q_proj\.(.*)", r"joint_blocks.\1.context_block.attn.qkv.\2"),
            (block + r"(attn2?)\.norm_([qk])\.(.*)", r"joint_blocks.\1.x_block.\2.ln_\3.\4"),
            (block + r"attn\.norm_added_([qk])\.(.*)", r"joint_blocks.\1.context_block.attn.ln_\2.\3"),
            (block + r"(attn2?)\.to_out\.0\.(.*)", r"joint_blocks.\1.x_block.\2.proj.\3"),
            (block + r"attn\.to_add_out\.(.*)", r"joint_blocks.\1.context_block.attn.proj.\2"),
            (block + r"norm1\.linear\.(.*)", r"joint_blocks.\1.x_block.adaLN_modulation.1.\2"),
            (block + r"norm1_context\.linear\.(.*)", r"joint_blocks.\1.context_block.adaLN_modulation.1.\2"),
            (block + r"ff\.net\.0\.proj\.(.*)", r"joint_blocks.\1.x_block.mlp.fc1.\2"),
            (block + r"ff\.net\.2\.(.*)", r"joint_blocks.\1.x_block.mlp.fc2.\2"),
            (block + r"ff_context\.net\.0\.proj\.(.*)", r"joint_blocks.\1.context_block.mlp.fc1.\2"),
            (block + r"ff_context\.net\.2\.(.*)", r"joint_blocks.\1.context_block.mlp.fc2.\2"),
            (r"norm_out\.linear\.(.*)", r"final_layer.adaLN_modulation.1.\1"),
            (r"proj_out\.(.*)", r"final_layer.linear.\1"),
        ],
    )
    swap_halves(found, f"joint_blocks.{last}.context_block.adaLN_modulation.1")
    swap_halves(found, "final_layer.adaLN_modulation.1")
    return found


def flux(component: Component) -> Weights:
    """Convert a FluxTransformer2DModel."""
    double, single = r"transformer_blocks\.(\d+)\.", r"single_transformer_blocks\.(\d+)\."
    one = ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")
    weights = joined(component.weights, single + r"(?P<part>attn\.to_[qkv]|proj_mlp)\.(weight|bias)", one)
    found = renamed(
        join_attention(weights, double),
        [
            (r"time_text_embed\.timestep_embedder\.linear_1\.(.*)", r"time_in.in_layer.\1"),
            (r"time_text_embed\.timestep_embedder\.linear_2\.(.*)", r"time_in.out_layer.\1"),
            (r"time_text_embed\.text_embedder\.linear_1\.(.*)", r"vector_in.in_layer.\1"),
            (r"time_text_embed\.text_embedder\.linear_2\.(.*)", r"vector_in.out_layer.\1"),
            (r"time_text_embed\.guidance_embedder\.linear_1\.(.*)", r"guidance_in.in_layer.\1"),
            (r"time_text_embed\.guidance_embedder\.linear_2\.(.*)", r"guidance_in.out_layer.\1"),
            (r"context_embedder\.(.*)", r"txt_in.\1"),
            (r"x_embedder\.(.*)", r"img_in.\1"),
            (double + r"norm1\.linear\.(.*)", r"double_blocks.\1.img_mod.lin.\2"),
            (double + r"norm1_context\.linear\.(.*)", r"double_blocks.\1.txt_mod.lin.\2"),
            (double + r"attn\.to_q\.(.*)", r"double_blocks.\1.img_attn.qkv.\2"),
            (double + r"attn\.add_q_proj\.(.*)", r"double_blocks.\1.txt_attn.qkv.\2"),
            (double + r"attn\.norm_q\.weight", r"double_blocks.\1.img_attn.norm.query_norm.scale"),
            (double + r"attn\.norm_k\.weight", r"double_blocks.\1.img_attn.norm.key_norm.scale"),
            (double + r"attn\.norm_added_q\.weight", r"double_blocks.\1.txt_attn.norm.query_norm.scale"),
            (double + r"attn\.norm_added_k\.weight", r"double_blocks.\1.txt_attn.norm.key_norm.scale"),
            (double + r"attn\.to_out\.0\.(.*)", r"double_blocks.\1.img_attn.proj.\2"),
            (double + r"attn\.to_add_out\.(.*)", r"double_blocks.\1.txt_attn.proj.\2"),
            (double + r"ff\.net\.(0|2)(?:\.proj)?\.(.*)", r"double_blocks.\1.img_mlp.\2.\3"),
            (double + r"ff_context\.net\.(0|2)(?:\.proj)?\.(.*)", r"double_blocks.\1.txt_mlp.\2.\3"),
            (single + r"norm\.linear\.(.*)", r"single_blocks.\1.modulation.lin.\2"),
            (single + r"attn\.to_q\.(.*)", r"single_blocks.\1.linear1.\2"),
            (single + r"attn\.norm_q\.weight", r"single_blocks.\1.norm.query_norm.scale"),
            (single + r"attn\.norm_k\.weight", r"single_blocks.\1.norm.key_norm.scale"),
            (single + r"proj_out\.(.*)", r"single_blocks.\1.linear2.\2"),
            (r"norm_out\.linear\.(.*)", r"final_layer.adaLN_modulation.1.\1"),
            (r"proj_out\.(.*)", r"final_layer.linear.\1"),
        ],
    )
    swap_halves(found, "final_layer.adaLN_modulation.1")
    return found


# layouts


@dataclass(frozen=True)
class Clip:
    """A CLIP text model that user interfaces build from configs of their own, because a single file has no configs."""

    name: str
    width: int
    activation: str
    num_layers: int

    def __str__(self) -> str:
        return f"{self.name} (width {self.width}, {self.activation}, {self.num_layers} layers)"


CLIP_L = Clip("OpenAI's CLIP ViT-L", 768, "quick_gelu", 12)
CLIP_H = Clip("OpenCLIP ViT-H without its last layer", 1024, "gelu", 23)
CLIP_G = Clip("OpenCLIP ViT-bigG", 1280, "gelu", 32)
STANDARD_WIDTHS = {clip.width for clip in (CLIP_L, CLIP_H, CLIP_G)}
"""User interfaces cannot load CLIP text models of other widths."""


@dataclass(frozen=True)
class Layout:
    """Place of each component of a pipeline in the file, conversion of its weights, and what user interfaces assume."""

    components: dict[str, tuple[str | Callable[[Component], str], Callable[[Component], Weights]]]
    architecture: Callable[[Component], str]
    """The network's name in modelspec's metadata."""
    clips: dict[str, tuple[Clip, ...]]
    """The models that user interfaces may build for each CLIP text encoder."""
    scale: float
    """Scale with which user interfaces normalise latents."""
    shift: float = 0.0
    """Shift with which user interfaces normalise latents."""
    implementation: str = "https://github.com/Stability-AI/generative-models"
    """Reference implementation whose layout the network follows."""
    marks: Callable[[dict[str, Any]], Weights] = lambda scheduler: {}
    """Marker tensors from which user interfaces detect the objective, given the scheduler's config."""


def sdxl_marks(scheduler: dict[str, Any]) -> Weights:
    """Mark v-prediction, and schedules with zero terminal SNR."""
    marks = {"v_pred": scheduler.get("prediction_type") == "v_prediction"}
    marks["ztsnr"] = marks["v_pred"] and bool(scheduler.get("rescale_betas_zero_snr"))
    return {name: torch.zeros(1) for name, applies in marks.items() if applies}


def stable_diffusion_prefix(component: Component) -> str:
    """Return the prefix of Stable Diffusion's only text encoder."""
    return "cond_stage_model.model." if is_open_clip(component) else "cond_stage_model.transformer."


LAYOUTS = {
    "StableDiffusionPipeline": Layout(
        {
            "unet": (NETWORK, unet),
            "vae": ("first_stage_model.", vae),
            "text_encoder": (stable_diffusion_prefix, either_clip),
        },
        lambda network: (
            "stable-diffusion-v1"
            if network.config["cross_attention_dim"] == 768  # OpenAI's CLIP-L
            else "stable-diffusion-v2-512"
        ),
        {"text_encoder": (CLIP_L, CLIP_H)},
        scale=0.18215,
    ),
    "StableDiffusionXLPipeline": Layout(
        {
            "unet": (NETWORK, unet),
            "vae": ("first_stage_model.", vae),
            "text_encoder": ("conditioner.embedders.0.transformer.", clip),
            "text_encoder_2": ("conditioner.embedders.1.model.", open_clip),
        },
        lambda network: "stable-diffusion-xl-v1-base",
        {"text_encoder": (CLIP_L,), "text_encoder_2": (CLIP_G,)},
        scale=0.13025,
        marks=sdxl_marks,
    ),
    "StableDiffusion3Pipeline": Layout(
        {
            "transformer": (NETWORK, sd3),
            "vae": ("first_stage_model.", vae),
            "text_encoder": ("text_encoders.clip_l.transformer.", clip),
            "text_encoder_2": ("text_encoders.clip_g.transformer.", clip),
            "text_encoder_3": ("text_encoders.t5xxl.transformer.", t5),
        },
        lambda network: "stable-diffusion-v3-medium",
        {"text_encoder": (CLIP_L,), "text_encoder_2": (CLIP_G,)},
        scale=1.5305,
        shift=0.0609,
    ),
    "FluxPipeline": Layout(
        {
            "transformer": (NETWORK, flux),
            "vae": ("vae.", vae),
            "text_encoder": ("text_encoders.clip_l.transformer.", clip),
            "text_encoder_2": ("text_encoders.t5xxl.transformer.", t5),
        },
        lambda network: "Flux.1-dev" if network.config.get("guidance_embeds") else "Flux.1-schnell",
        {"text_encoder": (CLIP_L,)},
        scale=0.3611,
        shift=0.1159,
        implementation="https://github.com/black-forest-labs/flux",
    ),
}


def layout_of(pipeline_class: str | list[str]) -> Layout:
    """Return the layout of a pipeline class.

    Raises:
        RequestError: neither ComfyUI nor AUTOMATIC1111 reads such a pipeline from a single file.
    """
    if not isinstance(pipeline_class, str) or pipeline_class not in LAYOUTS:
        name = pipeline_class if isinstance(pipeline_class, str) else pipeline_class[-1]
        raise RequestError(
            f"ComfyUI and AUTOMATIC1111 cannot load {name} from a single file; supported classes: {', '.join(LAYOUTS)}"
            f". Omit `--format single-file` to export a folder for diffusers."
        )
    return LAYOUTS[pipeline_class]


# checks of what a file cannot record


def check_class(pipeline_class: str | list[str], objective: ObjectiveConfig) -> None:
    """Check that user interfaces can sample from a pipeline of this class in a single file.

    Raises:
        RequestError: the class has no single-file layout, or its network was trained with an objective that user
            interfaces do not assume.
    """
    network, predictions, schedule = "U-Net", [*PREDICTION_TYPES], SCHEDULE
    if "unet" not in layout_of(pipeline_class).components:
        network, predictions, schedule = "transformer", ["flow_matching"], FLOW_SCHEDULE
    settings = {name: getattr(objective, name) for name in schedule}
    if objective.prediction in predictions and settings == schedule:
        return
    if objective.prediction == "flow_matching":
        settings = {name: settings[name] for name in FLOW_SCHEDULE}  # the rest is unused
    raise RequestError(
        f"The {network} was trained with {_listed({'prediction': objective.prediction} | settings)}, which a single "
        f"file cannot record. ComfyUI and AUTOMATIC1111 assume prediction {' or '.join(predictions)} with "
        f"{_listed(schedule)}, so they would generate wrong images. Export it as a folder for diffusers instead."
    )


def check_scale(pipeline_class: str, scale: tuple[float, ...], shift: tuple[float, ...]) -> None:
    """Check that user interfaces normalise latents as in training.

    Args:
        scale: (channels,) scale of training; see `ImageTower`.
        shift: (channels,) shift of training.

    Raises:
        RequestError: they assume a different scale or shift for this class.
    """
    layout = layout_of(pipeline_class)
    if {*scale} == {layout.scale} and {*shift} == {layout.shift}:
        return
    raise RequestError(
        f"Training normalised the VAE's latents with scale {_values(scale)} and shift {_values(shift)}, which a single "
        f"file cannot record. ComfyUI and AUTOMATIC1111 assume scale {layout.scale} and shift {layout.shift} for a "
        f"{pipeline_class}, so their images would be wrong. Export it as a folder for diffusers instead."
    )


def check_text_encoders(pipeline_class: str, folders: Mapping[str, Path]) -> None:
    """Check that user interfaces encode prompts as the pipeline's CLIP text encoders do.

    Encoders of a width that user interfaces cannot load pass, because diffusers can read them with their own configs.

    Args:
        folders: folder of each component.

    Raises:
        RequestError: an encoder has a standard width, but not the activation and number of layers that user interfaces
            assume in its place.
    """
    for name, assumed in layout_of(pipeline_class).clips.items():
        config = CLIPTextConfig.from_pretrained(folders[name])
        found = (config.hidden_size, config.hidden_act, config.num_hidden_layers)
        known = [(clip.width, clip.activation, clip.num_layers) for clip in assumed]
        if config.hidden_size in STANDARD_WIDTHS and found not in known:
            raise RequestError(
                f"The {name} of {pipeline_class}, {folders[name]}, has width {found[0]}, activation {found[1]} and "
                f"{found[2]} layers. In a single file, ComfyUI and AUTOMATIC1111 assume "
                f"{' or '.join(map(str, assumed))}, so they would encode prompts wrongly. Export it as a folder for "
                f"diffusers instead."
            )


def _listed(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def _values(values: tuple[float, ...]) -> str:
    """Return the value of all channels, or one value per channel if they differ."""
    return str(values[0] if len({*values}) == 1 else values)


# metadata


def modelspec(
    pipeline: Path, title: str, resolution: str, prediction: str, date: datetime | None, description: str
) -> dict[str, str]:
    """Return the fields of Stability AI's modelspec 1.0.0 (https://github.com/Stability-AI/ModelSpec), which user
    interfaces show, without the hash.

    Args:
        resolution: width and height, such as `512x512`.
        prediction: the objective's prediction.
        date: when the checkpoint was written; None if that is unknown.

    Raises:
        RequestError: the pipeline's class has no layout for a single file.
    """
    layout = layout_of(json.loads((pipeline / "model_index.json").read_text())["_class_name"])
    network = "unet" if "unet" in layout.components else "transformer"
    config = json.loads((pipeline / network / "config.json").read_text())
    return {
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.architecture": layout.architecture(Component({}, config)),
        "modelspec.implementation": layout.implementation,
        "modelspec.title": title,
        "modelspec.resolution": resolution,
        **({} if date is None else {"modelspec.date": date.isoformat(timespec="seconds")}),
        "modelspec.description": description,
        "modelspec.prediction_type": PREDICTION_TYPES.get(prediction, prediction),
    }
