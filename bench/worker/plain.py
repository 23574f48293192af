"""Stage 1 as a simple script: tarfile, PIL, diffusers, transformers and MDSWriter in one loop.

It is reasonably efficient: it uses batches and no gradients, decodes each image and encodes each caption once for all
sizes, and writes the trainer's columns. It has no receipts, hashes, fsync or retries, and silently skips unreadable
samples.
"""

import io
import json
import tarfile
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from diffusers import AutoencoderKL
from PIL import Image, ImageOps
from streaming import MDSWriter
from transformers import CLIPTextModel, CLIPTokenizerFast

PICTURES = ("jpg", "png", "webp")
SCORES = ("aesthetic", "similarity", "punsafe", "pwatermark")


class Encoders(NamedTuple):
    """The two encoders, as functions of a batch."""

    pictures: Callable[[list[np.ndarray]], np.ndarray]
    """N times (side, side, 3) uint8 → (N, planes, h, w) float16."""
    captions: Callable[[list[str]], np.ndarray]
    """N captions → (N, tokens, width) float16."""


class Loaded(NamedTuple):
    """A sample with a decoded image."""

    key: str
    caption: str
    picture: Image.Image
    scores: np.ndarray


def load_encoders(vae: Path, text_encoder: Path, tokenizer: Path) -> Encoders:
    """Load the encoders in float32 on the CPU."""
    image = AutoencoderKL.from_pretrained(vae, torch_dtype=torch.float32).eval()
    text = CLIPTextModel.from_pretrained(text_encoder, dtype=torch.float32).eval()
    tokens_of = CLIPTokenizerFast.from_pretrained(tokenizer)

    @torch.no_grad()
    def pictures(batch: list[np.ndarray]) -> np.ndarray:
        pixels = torch.from_numpy(np.stack(batch)).permute(0, 3, 1, 2).float() / 127.5 - 1
        return image.encode(pixels).latent_dist.parameters.half().numpy()

    @torch.no_grad()
    def captions(batch: list[str]) -> np.ndarray:
        tokens = tokens_of(batch, padding="max_length", truncation=True, return_tensors="pt")
        return text(tokens.input_ids).last_hidden_state.half().numpy()

    return Encoders(pictures, captions)


def samples(tar: Path) -> Iterator[Loaded]:
    """Yield a tar's samples that have an image and a caption."""
    members: dict[str, dict[str, bytes]] = {}
    with tarfile.open(tar) as file:
        for member in file:
            key, _, suffix = member.name.partition(".")
            content = file.extractfile(member)
            assert content is not None
            members.setdefault(key, {})[suffix] = content.read()
    for key, found in members.items():
        data = next((found[suffix] for suffix in PICTURES if suffix in found), None)
        if data and "txt" in found:
            try:
                picture = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
            except (OSError, SyntaxError, ValueError):
                continue
            metadata = json.loads(found["json"])
            scores = np.array([metadata.get(name, np.nan) for name in SCORES], np.float32)
            yield Loaded(key, found["txt"].decode(), picture, scores)


def cut(picture: Image.Image, side: int) -> tuple[np.ndarray, tuple[int, int]]:
    """Scale an image's shorter side to `side`, and return the center crop and its corner in the original."""
    scale = side / min(picture.size)
    width, height = (max(side, round(length * scale)) for length in picture.size)
    left, top = (width - side) // 2, (height - side) // 2
    scaled = picture.resize((width, height), Image.Resampling.BICUBIC)
    pixels = np.asarray(scaled.crop((left, top, left + side, top + side)))
    return pixels, (round(top / scale), round(left / scale))


def encode_tars(
    tars: Iterable[Path], output: Path, encoders: Encoders, columns: dict[int, dict[str, str]], batch_size: int
) -> int:
    """Encode tars into one MDS dataset per image size, and return the number of samples written.

    Args:
        columns: image side → MDS columns.
    """
    writers = {side: MDSWriter(out=str(output / f"{side}x{side}"), columns=of) for side, of in columns.items()}
    written = 0
    for tar in tars:
        left = samples(tar)
        while batch := list(islice(left, batch_size)):
            states = encoders.captions([sample.caption for sample in batch])
            for side, writer in writers.items():
                fits = [i for i, sample in enumerate(batch) if min(sample.picture.size) >= side]
                if not fits:
                    continue
                cuts = [cut(batch[i].picture, side) for i in fits]
                latents = encoders.pictures([pixels for pixels, _ in cuts])
                for i, (_, corner), of_picture in zip(fits, cuts, latents, strict=True):
                    writer.write(row(batch[i], corner, of_picture, states[i]))
                written += len(fits)
    for writer in writers.values():
        writer.finish()
    return written


def row(sample: Loaded, corner: tuple[int, int], latents: np.ndarray, states: np.ndarray) -> dict[str, Any]:
    """Build the columns that the trainer reads."""
    return {
        "key": sample.key,
        "caption": sample.caption,
        "image_latents": latents,
        "text_latents.text": states,
        "size": np.array([*sample.picture.size, *corner], np.int32),
        "scores": sample.scores,
    }
