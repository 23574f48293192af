"""Decode some latents from a bucket into a contact sheet with keys and captions.

examples:
  python -m precompute.preview runs/data/latents
  python -m precompute.preview runs/data/latents --bucket 512x512 --samples 25 --output runs/512.png
"""

# This command is not part of `shards`, because that package does not import diffusers.

import shards.base.interrupt  # noqa: F401

# isort: split

import argparse
import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from PIL import Image, ImageDraw

from precompute.lettering import Lettering
from shards.base.device import best_device
from shards.base.errors import RequestError, console
from shards.base.store import Store
from shards.base.table import counted
from shards.format.encoding import EncodingRecord
from shards.format.models import hash_weights, model_folder
from shards.format.receipts import active_receipts
from shards.open import open_store
from shards.root.committed import iter_receipts, list_commits, read_receipts
from shards.root.reading import captions, image_latents, read_parts

OUTPUT = Path("runs/preview.png")
"""Default output, in a folder that git ignores."""
LABEL_LINES, LINE_HEIGHT, MARGIN, FONT_SIZE = 5, 15, 8, 12
MORE = " …"
SMALLEST_TILE = 256
DECODE_TOGETHER = 4


def load_decoder(encoding: EncodingRecord, name: str | None) -> Any:
    """Load the VAE that produced the latents, from `name` if it is given, or else from the model named in
    encoding.json. Raises RequestError if the model is missing, or its weights differ from the recorded ones."""
    folder = model_folder(name or encoding.image.weights.name)
    if hash_weights(str(folder), folder).sha256 != encoding.image.weights.sha256:
        raise RequestError(
            f"The VAE in {folder} did not produce these latents; according to encoding.json, "
            f"{encoding.image.weights.name} did. Pass the folder of that VAE with --vae."
        )
    vae: Any = getattr(diffusers, encoding.image.class_name).from_pretrained(
        folder, use_safetensors=True, torch_dtype=torch.float32
    )
    return vae.eval().to(best_device())


def pick_samples(store: Store, bucket: str | None, count: int) -> tuple[str, list[dict[str, Any]]]:
    """Choose a bucket, by default the first one with samples, and `count` samples spread over its parts.

    The samples are split as evenly as possible among the chosen parts, and each part contributes its first samples. If
    the bucket has more than `count` parts, `count` of them contribute one sample each. If the bucket has fewer than
    `count` samples, all of them are returned.

    Raises:
        RequestError: The bucket, or the whole root, has no samples.
    """
    root, has_samples = store.where(), (receipt for receipt in iter_receipts(store) if receipt.samples)
    bucket = bucket or next((receipt.bucket for receipt in has_samples), None)
    if bucket is None:
        raise RequestError(f"{root} has no samples yet. Run `make precompute` first.")
    names = active_receipts(list_commits(store))
    names = [name for name in names if name.split("/")[1] == bucket]
    # start with evenly spaced receipts: in a large root, the remaining ones are then never read
    spread = [names[number * len(names) // count] for number in range(count)] if len(names) > count else []
    parts: list[tuple[str, str, int]] = []
    for receipt in read_receipts(store, list(dict.fromkeys([*spread, *names]))):
        if receipt.bucket == bucket and receipt.samples:
            parts.append((receipt.tar, receipt.part, receipt.samples))
        if len(parts) == count:
            break
    if not parts:
        raise RequestError(
            f"{root} has no samples in bucket {bucket}. `python -m shards stats {root}` lists its buckets."
        )
    parts.sort()
    shares = fair_shares([samples for *_, samples in parts], count)
    return bucket, [
        sample
        for (_, part, _), share in zip(parts, shares, strict=True)
        for sample in read_parts(store, bucket, [part], share)
    ]


def fair_shares(sizes: list[int], total: int) -> list[int]:
    """Split `total` into shares that are as equal as possible, each no larger than the corresponding size."""
    shares = [0] * len(sizes)
    by_size = sorted(range(len(sizes)), key=lambda place: sizes[place])
    for number, place in enumerate(by_size):
        shares[place] = min(sizes[place], total // (len(sizes) - number))
        total -= shares[place]
    return shares


@torch.inference_mode()
def decode_pictures(samples: list[dict[str, Any]], encoding: EncodingRecord, vae: Any) -> list[Image.Image]:
    """Decode stored latents into images, using the mean wherever a posterior is stored."""
    pictures = []
    for start in range(0, len(samples), DECODE_TOGETHER):
        stored = np.stack([image_latents(sample) for sample in samples[start : start + DECODE_TOGETHER]])
        means = torch.from_numpy(stored[:, : encoding.image.channels]).to(vae.device)
        pixels = ((vae.decode(means).sample.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
        pictures += [Image.fromarray(array) for array in pixels.permute(0, 2, 3, 1).cpu().numpy()]
    return pictures


def contact_sheet(pictures: list[Image.Image], labels: list[str], title: str, lettering: Lettering) -> Image.Image:
    """Arrange images in a grid below `title`, each above its wrapped label. Small images are enlarged."""
    scale = max(1, SMALLEST_TILE // pictures[0].width)
    width, height = pictures[0].width * scale, pictures[0].height * scale
    columns = math.ceil(len(pictures) ** 0.5)
    rows = -(-len(pictures) // columns)
    cell = width + MARGIN, height + LABEL_LINES * LINE_HEIGHT + MARGIN
    sheet = Image.new("RGB", (columns * cell[0] + MARGIN, rows * cell[1] + 3 * MARGIN + LINE_HEIGHT), "white")
    draw = ImageDraw.Draw(sheet)
    lettering.write(draw, MARGIN, MARGIN, title)
    for i, (picture, label) in enumerate(zip(pictures, labels, strict=True)):
        left, top = MARGIN + i % columns * cell[0], 2 * MARGIN + LINE_HEIGHT + i // columns * cell[1]
        sheet.paste(picture.resize((width, height), Image.Resampling.NEAREST), (left, top))
        for number, line in enumerate(wrapped(label, width, lettering)):
            lettering.write(draw, left, top + height + 2 + number * LINE_HEIGHT, line)
    return sheet


def wrapped(label: str, width: float, lettering: Lettering) -> list[str]:
    """Wrap a label into at most LABEL_LINES lines of `width` pixels, and return them. The label's own first line is
    kept unchanged. If the text does not fit, the last line ends with an ellipsis."""
    first, _, rest = label.partition("\n")
    lines = list(islice(_filled(rest.split(), width, lettering), LABEL_LINES))
    if len(lines) < LABEL_LINES:
        return [first, *lines]
    *kept, last = lines[: LABEL_LINES - 1]
    while last and lettering.length(last + MORE) > width:
        last = last[:-1].rstrip()
    return [first, *kept, last + MORE]


def _filled(words: list[str], width: float, lettering: Lettering) -> Iterator[str]:
    """Yield lines filled with words. A word that is wider than a line, which is common in scripts without spaces, may
    be broken at any character."""
    line = ""
    for word in words:
        separator = " "
        for piece in [word] if lettering.length(word) <= width else word:
            if line and lettering.length(f"{line}{separator}{piece}") > width:
                yield line
                line = ""
            line = f"{line}{separator}{piece}" if line else piece
            separator = ""
    if line:
        yield line


def run(arguments: list[str]) -> None:
    """Run `python -m precompute.preview` with these arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m precompute.preview",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("root", help="local folder, or URL such as s3://bucket/latents")
    parser.add_argument("--bucket", help="WIDTHxHEIGHT; default: the first bucket with samples")
    parser.add_argument("--samples", type=int, default=16, help="number of samples; default: 16")
    parser.add_argument("--output", type=Path, default=OUTPUT, help=f"PNG to write; default: {OUTPUT}")
    parser.add_argument("--vae", help="folder of the VAE; default: the one in encoding.json")
    options = parser.parse_args(arguments)
    if options.samples < 1:
        raise RequestError(f"--samples is {options.samples}, but must be at least 1.")
    store = open_store(options.root)
    encoding = EncodingRecord.load(store)
    bucket, samples = pick_samples(store, options.bucket, options.samples)
    pictures = decode_pictures(samples, encoding, load_decoder(encoding, options.vae))
    labels = [f"{sample['key']}\n{' | '.join(captions(sample, encoding))}" for sample in samples]
    title = f"{bucket} of {Path(store.where()).name}, latents decoded by {encoding.image.weights.name}"
    lettering = Lettering([title, *labels], FONT_SIZE)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    contact_sheet(pictures, labels, title, lettering).save(options.output)
    print(f"{options.output}: {counted(len(samples), 'sample')} from bucket {bucket}")
    if lettering.note:
        print(lettering.note)


main = console(run)

if __name__ == "__main__":
    main()
