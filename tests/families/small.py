"""Small versions of the eight families of configs/: random models under the shipped configs.

Backbone, inputs, towers and objective are those of the family's YAML; only the sizes differ.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import yaml
from diffusers import AutoencoderDC, AutoencoderKL
from diffusers.pipelines.prx import T5GemmaEncoder
from torch import nn
from transformers import (
    AutoTokenizer,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    Gemma2Config,
    Gemma2Model,
    T5Config,
    T5EncoderModel,
    T5GemmaConfig,
    T5GemmaModuleConfig,
)

from tests.fixtures import encode_all, precompute_config
from tests.runs import train_fields
from tests.tiny import kl, make_samples, make_tar, make_tokenizer
from tests.tiny_towers import character_tokenizer, dc

CONFIGS = Path(__file__).parents[2] / "configs"
TOKENS = 24
TEMPLATE = "draw: {}"
SIZES = [(80, 64), (90, 120), (64, 64), (200, 150)]


def laid(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Merge a config's values over those of its base, section by section."""
    both = {key for key in below.keys() & above.keys() if isinstance(below[key], dict) and isinstance(above[key], dict)}
    return below | above | {key: laid(below[key], above[key]) for key in both}


@dataclass(frozen=True)
class Family:
    """A folder of configs/, with the fields that make it small."""

    name: str
    vae: str
    towers: dict[str, tuple[str, int]]
    """Text towers of its precompute.yaml: name → kind of model and its width."""
    backbone: dict[str, Any]
    """Fields of its backbone.json to override with small values."""
    text: dict[str, Any] = field(default_factory=dict)
    """Fields of its text towers to override."""
    configs: Path = CONFIGS

    def read(self, name: str) -> dict[str, Any]:
        """Read one of its YAML files, merged with its base."""
        path = self.configs / self.name / name
        values: dict[str, Any] = yaml.safe_load(path.read_text())
        while base := values.pop("base", None):
            path = path.parent / base
            values = laid(yaml.safe_load(path.read_text()), values)
        return values

    @property
    def network(self) -> dict[str, Any]:
        """Return the small diffusers config of its network."""
        full = self.read("phase1.yaml")["backbone"]["config"]
        fields: dict[str, Any] = json.loads((self.configs.parent / full).read_text())
        return fields | self.backbone


UNET = {
    "attention_head_dim": 4,
    "block_out_channels": [16, 32],
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "sample_size": 8,
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
}
XL = {
    "cross_attention_dim": 36,
    "addition_time_embed_dim": 4,
    "projection_class_embeddings_input_dim": 34,
    "transformer_layers_per_block": [1, 2],
}
PIXART = {
    "attention_head_dim": 8,
    "caption_channels": 12,
    "cross_attention_dim": 16,
    "num_attention_heads": 2,
    "num_layers": 2,
    "sample_size": 8,
}
SD3 = {
    "attention_head_dim": 8,
    "caption_projection_dim": 16,
    "in_channels": 4,
    "joint_attention_dim": 40,
    "num_attention_heads": 2,
    "num_layers": 2,
    "out_channels": 4,
    "pooled_projection_dim": 18,
    "pos_embed_max_size": 8,
    "sample_size": 8,
}
FLUX = {
    "attention_head_dim": 12,
    "axes_dims_rope": [4, 4, 4],
    "in_channels": 16,
    "joint_attention_dim": 12,
    "num_attention_heads": 2,
    "num_layers": 1,
    "num_single_layers": 1,
    "pooled_projection_dim": 16,
}
SANA = {
    # its attention divides by sums of ReLUs, which are close to zero in narrower heads
    "attention_head_dim": 16,
    "caption_channels": 12,
    "cross_attention_dim": 32,
    "cross_attention_head_dim": 16,
    "in_channels": 4,
    "num_attention_heads": 2,
    "num_cross_attention_heads": 2,
    "num_layers": 2,
    "out_channels": 4,
    "sample_size": 16,
}
PRX = {
    "axes_dim": [8, 8],
    "context_in_dim": 12,
    "depth": 2,
    "hidden_size": 32,
    "in_channels": 4,
    "num_heads": 2,
}
FAMILIES = {
    family.name: family
    for family in (
        Family("sd2", "sd", {"text": ("clip", 16)}, UNET | {"cross_attention_dim": 16}),
        Family("sd15", "sd", {"text": ("clip", 16)}, UNET | {"cross_attention_dim": 16}),
        Family("sdxl", "kl", {"clip_l": ("clip", 16), "clip_g": ("projected", 20)}, UNET | XL),
        Family("pixart-sigma", "kl", {"t5": ("t5", 12)}, PIXART, {"max_tokens": TOKENS}),
        Family(
            "sd3",
            "shifted",
            {"clip_l": ("projected", 16), "clip_g": ("projected", 20), "t5": ("t5", 40)},
            SD3,
            {"max_tokens": TOKENS},
        ),
        Family("flux1", "shifted", {"clip": ("clip", 16), "t5": ("t5", 12)}, FLUX, {"max_tokens": TOKENS}),
        Family(
            "sana",
            "dc",
            {"gemma": ("gemma", 12)},
            SANA,
            {"max_tokens": TOKENS - 2, "keep": [[0, 1], [-TOKENS + 1, None]], "template": TEMPLATE},
        ),
        Family("prx", "shifted", {"t5gemma": ("t5gemma", 12)}, PRX, {"max_tokens": TOKENS}),
    )
}


def in_make_test(*names: str) -> list[Any]:
    """Return all families; `make test` runs only those named, and `make test-families` runs all."""
    return [name if name in names else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]


ALL_BUT_SD = in_make_test(*(name for name in FAMILIES if name not in ("sd15", "sd2")))
"""SDXL's network has all classes of Stable Diffusion 1.5's and 2's, which most other tests train."""


@dataclass(frozen=True)
class Small:
    """Folder with a small family's models, tars and configs."""

    family: Family
    folder: Path
    latents: str = "latents"

    @property
    def root(self) -> Path:
        """Latents root."""
        return self.folder / self.latents

    @property
    def tar(self) -> Path:
        """Tar of pictures and captions."""
        return self.folder / "tars" / "00000.tar"

    def encode(self, image: str = "float16", **stored: Any) -> None:
        """Run stage 1 in float32 with the shipped towers. Captions are untrimmed float16 unless `stored` overrides it,
        and `image` sets the storage of pictures."""
        shipped = self.family.read("precompute.yaml")
        texts = {
            name: self._tower(name, shipped.get("texts", {}).get(name, {})) | stored for name in self.family.towers
        }
        changes: dict[str, Any] = {"vae": str(self.folder / "vae"), "buckets": ["64x64"], "texts": texts}
        changes["image"] = {"storage": image}
        encode_all(precompute_config(self.folder, self.tar.parent, self.root, **changes))

    def _tower(self, name: str, shipped: dict[str, Any]) -> dict[str, Any]:
        kind, _ = self.family.towers[name]
        folders = {"model": str(self.folder / name), "tokenizer": str(self.folder / f"{name}_tokenizer")}
        sizes = {} if kind in ("clip", "projected") else self.family.text
        return {**shipped, **folders, **sizes, "storage": "float16", "trim": False}

    def train_fields(self, run_dir: Path, **changes: Any) -> dict[str, Any]:
        """Return the config of a small run with the shipped backbone and objective."""
        shipped = self.family.read("phase1.yaml")
        backbone = {**shipped.get("backbone", {}), "config": str(self.folder / "backbone.json")}
        fields = train_fields(self.root, run_dir, objective=shipped["objective"], **changes)
        return {**fields, "backbone": backbone}

    def components(self) -> dict[str, Any]:
        """Load the pipeline's encoders with diffusers and transformers."""
        pipeline = self.family.read("phase1.yaml").get("backbone", {}).get("pipeline", {})
        towers = pipeline.get("towers", list(self.family.towers))
        vae_class = AutoencoderDC if self.family.vae == "dc" else AutoencoderKL
        found: dict[str, Any] = {"vae": vae_class.from_pretrained(self.folder / "vae").eval()}
        for i, name in enumerate(towers, 1):
            end = "" if i == 1 else f"_{i}"
            kind, _ = self.family.towers[name]
            found[f"text_encoder{end}"] = CLASSES[kind].from_pretrained(self.folder / name).eval()
            found[f"tokenizer{end}"] = AutoTokenizer.from_pretrained(self.folder / f"{name}_tokenizer")
        return found

    def pipeline(self, network: nn.Module, scheduler: Any) -> Any:
        """Build the family's diffusers pipeline around a network."""
        shipped = self.family.read("phase1.yaml").get("backbone", {}).get("pipeline", {})
        name = shipped.get("class_name", "StableDiffusionPipeline")
        settings = shipped.get("settings", {})
        if name == "StableDiffusionPipeline":
            settings = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
        key = "unet" if "StableDiffusion" in name and "3" not in name else "transformer"
        pipeline = getattr(diffusers, name)(**self.components(), **{key: network}, scheduler=scheduler, **settings)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline


def make_small(family: Family, folder: Path) -> Small:
    """Make the models, a tar of 12 samples with captions of several lengths, and the latents."""
    small = Small(family, folder)
    make_tokenizer(folder / "tokenizer")
    torch.manual_seed(7)
    VAES[family.vae]().save_pretrained(folder / "vae")
    for tower, (kind, width) in family.towers.items():
        MAKERS[kind](width).save_pretrained(folder / tower)
        if kind == "t5gemma":
            t5gemma_config(width).save_pretrained(folder / tower)  # the hub's folder has both encoder and decoder
        source: Any = AutoTokenizer.from_pretrained(folder / "tokenizer")
        if kind not in ("clip", "projected"):
            source = character_tokenizer("t5" if kind == "t5" else "gemma")
        source.save_pretrained(folder / f"{tower}_tokenizer")
    (folder / "backbone.json").write_text(json.dumps(family.network))
    samples = make_samples(0, 12, SIZES)
    for i, (_, members) in enumerate(samples):
        members["txt"] = (f"{i} Round blobs" + " of CLAY" * (i % 3)).encode()
    make_tar(folder / "tars", "00000", samples)
    small.encode()
    return small


def stir(network: nn.Module) -> None:
    """Perturb all weights: some networks start with zeros, which block the influence of captions."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


def shifted() -> AutoencoderKL:
    """Give the VAE a shift, and no convolutions around the latents."""
    return kl(shift_factor=0.2, scaling_factor=1.3, use_quant_conv=False, use_post_quant_conv=False)


def sd() -> AutoencoderKL:
    """Give the VAE the scale of Stable Diffusion 1.5 and 2, which single-file exports require."""
    return kl(scaling_factor=0.18215)


def clip_config(width: int) -> CLIPTextConfig:
    """Return a CLIP config for 16 tokens, with the tokenizer of tests/tiny.py."""
    return CLIPTextConfig(
        vocab_size=514,
        hidden_size=width,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=16,
        bos_token_id=512,
        eos_token_id=513,
        pad_token_id=513,
        projection_dim=width // 2,
    )


def gemma_fields(width: int) -> dict[str, Any]:
    """Return the config fields of Gemma 2 and its derivatives."""
    return {
        "vocab_size": 64,
        "hidden_size": width,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 6,
        "max_position_embeddings": 128,
    }


def t5gemma_config(width: int) -> T5GemmaConfig:
    """Return a config of encoder and decoder."""
    half = T5GemmaModuleConfig(**gemma_fields(width))
    return T5GemmaConfig(encoder=half, decoder=half, architectures=["T5GemmaEncoder"])


def t5(width: int) -> T5EncoderModel:
    """Make the encoder alone."""
    return T5EncoderModel(T5Config(vocab_size=64, d_model=width, d_kv=6, d_ff=24, num_layers=2, num_heads=2))


VAES: dict[str, Callable[[], Any]] = {"kl": kl, "sd": sd, "shifted": shifted, "dc": dc}
CLASSES: dict[str, Any] = {
    "clip": CLIPTextModel,
    "projected": CLIPTextModelWithProjection,
    "t5": T5EncoderModel,
    "gemma": Gemma2Model,
    "t5gemma": T5GemmaEncoder,
}
MAKERS: dict[str, Callable[[int], Any]] = {
    "clip": lambda width: CLIPTextModel(clip_config(width)),
    "projected": lambda width: CLIPTextModelWithProjection(clip_config(width)),
    "t5": t5,
    "gemma": lambda width: Gemma2Model(Gemma2Config(**gemma_fields(width))),
    "t5gemma": lambda width: T5GemmaEncoder(t5gemma_config(width).encoder),
}
