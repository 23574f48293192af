"""Small models, tars and tables with the layout of real ones: random weights and pictures, made in a moment."""

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from diffusers import AutoencoderKL, StableDiffusionPipeline, UNet2DConditionModel
from PIL import Image
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

TEXT_LENGTH = 16
TEXT_WIDTH = 16


def kl(**changes: Any) -> AutoencoderKL:
    """Make a VAE with 8 × downsampling and 4 channels."""
    return AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=[8, 8, 8, 8],
        latent_channels=4,
        norm_num_groups=4,
        layers_per_block=1,
        sample_size=64,
        **{"scaling_factor": 0.5, **changes},
    )


def make_tokenizer(folder: Path) -> CLIPTokenizer:
    """Save a tokenizer of CLIP with a token per byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    characters = [*map(chr, printable), *(chr(256 + i) for i in range(256 - len(printable)))]  # one token per byte
    vocabulary = [*characters, *(character + "</w>" for character in characters), "<|startoftext|>", "<|endoftext|>"]
    folder.mkdir(parents=True)
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(vocabulary)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    files = str(folder / "vocab.json"), str(folder / "merges.txt")
    tokenizer = CLIPTokenizer(*files, model_max_length=TEXT_LENGTH)
    tokenizer.save_pretrained(folder)
    return tokenizer


def make_models(folder: Path, seed: int = 0) -> Path:
    """Save a VAE (8 × downsampling, 4 channels), a CLIP text encoder (16 tokens of 16) and its tokenizer below
    `folder`."""
    torch.manual_seed(seed)
    vae = kl()
    vae.save_pretrained(folder / "vae")
    num_tokens = len(make_tokenizer(folder / "tokenizer"))
    config = CLIPTextConfig(
        vocab_size=num_tokens,
        hidden_size=TEXT_WIDTH,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=TEXT_LENGTH,
        bos_token_id=num_tokens - 2,
        eos_token_id=num_tokens - 1,
        pad_token_id=num_tokens - 1,
        projection_dim=16,
    )
    CLIPTextModel(config).save_pretrained(folder / "text_encoder")
    return folder


def stable_diffusion(models: Path, unet: UNet2DConditionModel, scheduler: Any) -> StableDiffusionPipeline:
    """Build a pipeline of a U-Net and the models of `make_models`."""
    return StableDiffusionPipeline(
        vae=AutoencoderKL.from_pretrained(models / "vae"),
        text_encoder=CLIPTextModel.from_pretrained(models / "text_encoder"),
        tokenizer=CLIPTokenizer.from_pretrained(models / "tokenizer"),
        unet=unet,
        scheduler=scheduler,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def saved(image: Image.Image, format: str = "PNG", **options: object) -> bytes:
    """Encode the picture as file bytes."""
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def picture(rng: np.random.Generator, width: int, height: int, format: str = "JPEG") -> bytes:
    """Draw a smooth random picture, and encode it as file bytes."""
    coarse = rng.integers(0, 256, (max(2, height // 16), max(2, width // 16), 3), dtype=np.uint8)
    return saved(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), format)


def make_tar(folder: Path, name: str, samples: Sequence[tuple[str, dict[str, bytes]]], stats: bool = True) -> Path:
    """Write NAME.tar with (key, {suffix: bytes}) samples, and img2dataset's sidecar files if `stats`."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(folder / f"{name}.tar", "w") as tar:
        for key, members in samples:
            for suffix, data in members.items():
                member = tarfile.TarInfo(f"{key}.{suffix}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    if stats:
        (folder / f"{name}_stats.json").write_text(json.dumps({"count": len(samples), "successes": len(samples)}))
        table = pa.table({"key": [key for key, _ in samples], "status": ["success"] * len(samples)})
        pq.write_table(table, folder / f"{name}.parquet")
    return folder / f"{name}.tar"


def read_tar(path: Path) -> dict[str, dict[str, bytes]]:
    """Read a tar as key → suffix → bytes."""
    members: dict[str, dict[str, bytes]] = {}
    with tarfile.open(path) as tar:
        for member in tar:
            key, _, suffix = member.name.partition(".")
            file = tar.extractfile(member)
            assert file is not None
            members.setdefault(key, {})[suffix] = file.read()
    return members


def flip_a_bit(path: Path, offset: int | None = None) -> None:
    """Flip a bit of the byte at `offset`, by default in the middle of the file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if offset is None else offset] ^= 1
    path.write_bytes(data)


def table_of(path: Path, rows: Mapping[str, str | None], **options: Any) -> Path:
    """Write a Parquet table of keys and captions (`vlm`)."""
    pq.write_table(pa.table({"key": list(rows), "vlm": pa.array(rows.values(), pa.string())}), path, **options)
    return path


def make_samples(shard: int, count: int, sizes: Sequence[tuple[int, int]]) -> list[tuple[str, dict[str, bytes]]]:
    """Make `count` valid samples whose sizes cycle through `sizes`."""
    samples = []
    for i in range(count):
        rng = np.random.default_rng([shard, i])
        key = f"{shard:05d}{i:04d}"
        data = picture(rng, *sizes[i % len(sizes)], format=("JPEG", "PNG", "WEBP")[i % 3])
        metadata = {
            "url": f"http://example.org/{key}",
            "key": key,
            "punsafe": 0.01 * i,
            "AESTHETIC_SCORE": 5.0 + i / 10,
            "sha256": hashlib.sha256(data).hexdigest(),
        }
        caption = f"picture {key} of {i} blobs"
        samples.append((key, {"jpg": data, "txt": caption.encode(), "json": json.dumps(metadata).encode()}))
    return samples
