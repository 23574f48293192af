"""Small random models of the kinds that families other than Stable Diffusion use."""

from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderDC
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    Dinov2Config,
    Dinov2Model,
    Gemma2Config,
    Gemma2Model,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

from precompute.config import PrecomputeConfig
from tests.fixtures import precompute_config

T5_LENGTH, T5_WIDTH = 24, 12
BUCKET = "64x64"
DINO_WIDTH, PATCH = 16, 14


def dc() -> AutoencoderDC:
    """Make an autoencoder with 4 × downsampling and no posterior."""
    return AutoencoderDC(
        latent_channels=4,
        encoder_block_out_channels=(8, 8, 8),
        decoder_block_out_channels=(8, 8, 8),
        encoder_layers_per_block=(1, 1, 1),
        decoder_layers_per_block=(1, 1, 1),
        encoder_block_types="ResBlock",
        decoder_block_types="ResBlock",
        encoder_qkv_multiscales=((), (), ()),
        decoder_qkv_multiscales=((), (), ()),
        scaling_factor=0.41,
    )


def make_towers(folder: Path, seed: int = 1) -> Path:
    """Save CLIP with a projection, T5, Gemma 2, their tokenizers, DINOv2 and DC-AE below `folder`."""
    torch.manual_seed(seed)
    clip = CLIPTextConfig(
        vocab_size=514,
        hidden_size=20,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=16,
        bos_token_id=512,
        eos_token_id=513,
        pad_token_id=513,
        projection_dim=10,
    )
    CLIPTextModelWithProjection(clip).save_pretrained(folder / "clip")
    t5 = T5Config(vocab_size=64, d_model=T5_WIDTH, d_kv=6, d_ff=24, num_layers=2, num_heads=2)
    T5EncoderModel(t5).save_pretrained(folder / "t5")
    gemma = Gemma2Config(
        vocab_size=64,
        hidden_size=12,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=6,
        max_position_embeddings=128,
    )
    Gemma2Model(gemma).save_pretrained(folder / "gemma")
    for name in ("t5", "gemma"):
        character_tokenizer(name).save_pretrained(folder / f"{name}_tokenizer")
    dino = Dinov2Config(
        hidden_size=DINO_WIDTH, num_hidden_layers=2, num_attention_heads=2, image_size=56, patch_size=PATCH, mlp_ratio=2
    )
    Dinov2Model(dino).save_pretrained(folder / "dino")
    dc().save_pretrained(folder / "dc_ae")
    return folder


def character_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per letter; T5's ends a caption with </s>, Gemma's starts it with <bos> and pads
    left."""
    letters = [chr(code) for code in range(97, 123)] + list("0123456789 .:{}")
    vocabulary = {token: i for i, token in enumerate(["<pad>", "</s>", "<bos>", "<unk>", *letters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    ends = {"t5": ("$A </s>", [("</s>", 1)]), "gemma": ("<bos> $A", [("<bos>", 2)])}
    single, special = ends[kind]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        bos_token="<bos>",
        unk_token="<unk>",
        padding_side="left" if kind == "gemma" else "right",
        model_max_length=512,
    )


def texts(towers: Path, models: Path, **of_t5: Any) -> dict[str, Any]:
    """Return the config of two text towers: SDXL's second one, and T5 as in PixArt."""
    t5 = {"model": str(towers / "t5"), "tokenizer": str(towers / "t5_tokenizer"), "max_tokens": T5_LENGTH}
    return {
        "clip": {"model": str(towers / "clip"), "tokenizer": str(models / "tokenizer"), "layer": -2, "pooled": True},
        "t5": {**t5, "masked": True} | of_t5,
    }


def config_of(models: Path, tars: Path, root: Path, towers: Path, **changes: Any) -> PrecomputeConfig:
    """Return a stage 1 config with two text towers, a feature tower and one bucket."""
    fields = {
        "texts": texts(towers, models),
        "features": {"dino": {"model": str(towers / "dino")}},
        "buckets": [BUCKET],
    }
    return precompute_config(models, tars, root, **(fields | changes))
