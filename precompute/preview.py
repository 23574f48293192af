"""Decode some of a bucket's latents back to pictures, on a contact sheet with keys and captions.

examples:
  python -m precompute.preview runs/data/latents
  python -m precompute.preview runs/data/latents --bucket 512x512 --samples 25 --output preview.png
"""

# It lives here and not in `shards`, which knows nothing of diffusers.

import argparse
import math
import textwrap
from itertools import islice
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from shards.base.errors import RequestError, console
from shards.base.store import Store
from shards.format.encoding import EncodingRecord
from shards.format.models import hash_weights, model_folder
from shards.open import open_store
from shards.root.committed import load_receipts
from shards.root.reading import captions, image_latents, read_parts

LABEL_LINES, LINE_HEIGHT, MARGIN, CHARACTER_WIDTH = 5, 14, 8, 7
SMALLEST_TILE = 256
DECODE_TOGETHER = 4


def load_decoder(encoding: EncodingRecord, name: str | None) -> Any:
    """The VAE that made the latents: where encoding.json says it was, or at `name`.

    Raises:
        RequestError: it is not there, or has other content than encoding.json recorded.
    """
    folder = model_folder(name or encoding.image.weights.name)
    if hash_weights(str(folder), folder).sha256 != encoding.image.weights.sha256:
        raise RequestError(f"The VAE in {folder} is not the one that made these latents. Give that one with --vae.")
    vae: Any = getattr(diffusers, encoding.image.class_name).from_pretrained(folder, use_safetensors=True)
    return vae.eval().to("cuda" if torch.cuda.is_available() else "cpu", torch.float32)


def pick_samples(store: Store, bucket: str | None, count: int) -> tuple[str, list[dict[str, Any]]]:
    """A bucket, by default the first that holds samples, and samples from all over it: of each committed part as many,
    its first ones, up to `count`.

    Raises:
        RequestError: the bucket, or every one, holds none.
    """
    holding, root = [receipt for receipt in load_receipts(store) if receipt.samples], store.where()
    if not holding:
        raise RequestError(f"{root} holds no sample yet: run `make precompute` first.")
    bucket = bucket or holding[0].bucket
    parts = [receipt.part for receipt in holding if receipt.bucket == bucket]
    if not parts:
        raise RequestError(f"{root} holds no sample in {bucket}. `python -m shards stats {root}` lists its buckets.")
    chosen = parts[:: max(1, len(parts) // count)]
    each = -(-count // len(chosen))
    return bucket, list(islice(read_parts(store, bucket, chosen, each), count))


@torch.inference_mode()
def decode_pictures(samples: list[dict[str, Any]], encoding: EncodingRecord, vae: Any) -> list[Image.Image]:
    """The posterior's means, decoded."""
    pictures = []
    for start in range(0, len(samples), DECODE_TOGETHER):
        stored = np.stack([image_latents(sample) for sample in samples[start : start + DECODE_TOGETHER]])
        means = torch.from_numpy(stored[:, : encoding.image.channels]).to(vae.device)
        pixels = ((vae.decode(means).sample.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
        pictures += [Image.fromarray(array) for array in pixels.permute(0, 2, 3, 1).cpu().numpy()]
    return pictures


def contact_sheet(pictures: list[Image.Image], labels: list[str], title: str) -> Image.Image:
    """Pictures in a grid, each with its label, wrapped, under it. Small ones are shown enlarged."""
    scale = max(1, SMALLEST_TILE // pictures[0].width)
    width, height = pictures[0].width * scale, pictures[0].height * scale
    columns = math.ceil(len(pictures) ** 0.5)
    rows = -(-len(pictures) // columns)
    cell = width + MARGIN, height + LABEL_LINES * LINE_HEIGHT + MARGIN
    sheet = Image.new("RGB", (columns * cell[0] + MARGIN, rows * cell[1] + 3 * MARGIN + LINE_HEIGHT), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=12)
    draw.text((MARGIN, MARGIN), title, "black", font)
    for i, (picture, label) in enumerate(zip(pictures, labels, strict=True)):
        left, top = MARGIN + i % columns * cell[0], 2 * MARGIN + LINE_HEIGHT + i // columns * cell[1]
        sheet.paste(picture.resize((width, height), Image.Resampling.NEAREST), (left, top))
        lines = wrapped(label, width // CHARACTER_WIDTH)
        for number, line in enumerate(lines):
            draw.text((left, top + height + 2 + number * LINE_HEIGHT), line, "black", font)
    return sheet


def wrapped(label: str, characters: int) -> list[str]:
    """A label in lines: its first line as it is, the rest filled up, the last with an ellipsis where there is more."""
    first, _, rest = label.partition("\n")
    return [first, *textwrap.wrap(rest, characters, max_lines=LABEL_LINES - 1, placeholder=" …")]


def run(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m precompute.preview",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("root", help="a folder, or an address such as s3://bucket/latents")
    parser.add_argument("--bucket", help="WIDTHxHEIGHT; default: the first that holds samples")
    parser.add_argument("--samples", type=int, default=16, help="how many")
    parser.add_argument("--output", type=Path, default=Path("preview.png"), help="a PNG")
    parser.add_argument("--vae", help="where the VAE is now, if not where encoding.json says")
    options = parser.parse_args(arguments)
    if options.samples < 1:
        raise RequestError(f"--samples {options.samples}: give 1 or more.")
    store = open_store(options.root)
    encoding = EncodingRecord.load(store)
    bucket, samples = pick_samples(store, options.bucket, options.samples)
    pictures = decode_pictures(samples, encoding, load_decoder(encoding, options.vae))
    labels = [f"{sample['key']}\n{' | '.join(captions(sample, encoding))}" for sample in samples]
    title = f"{bucket} of {Path(store.where()).name}, decoded from its latents by {encoding.image.weights.name}"
    contact_sheet(pictures, labels, title).save(options.output)
    print(f"{options.output}: {len(samples)} samples of {bucket}")


main = console(run)

if __name__ == "__main__":
    main()
