"""Write a page that shows a root: decoded latents with their captions, buckets, rejects and caption lengths.

examples:
  python -m precompute.preview runs/data/latents
  python -m precompute.preview runs/data/latents --bucket 512x512 --samples 25 --output runs/512.html
"""

# This command is not part of `shards`, because that package does not import diffusers.

import shards.base.interrupt  # noqa: F401

# isort: split

import argparse
import base64
import io
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import diffusers
import jinja2
import numpy as np
import torch
from PIL import Image

from shards.base.device import best_device
from shards.base.durable import write_output
from shards.base.errors import RequestError, console
from shards.base.store import Store, parse_local
from shards.base.table import counted
from shards.format.buckets import Bucket
from shards.format.encoding import EncodingRecord
from shards.format.models import hash_weights, model_folder
from shards.format.receipts import active_receipts
from shards.format.tables import read_tables
from shards.open import open_store
from shards.root.committed import iter_committed_tars, list_commits, read_receipts
from shards.root.reading import captions, image_latents, read_parts
from shards.tools.stats import root_stats

OUTPUT = Path("runs/preview.html")
"""Default output, in a folder that git ignores."""
PAGE = Path(__file__).with_name("preview.html")
MEASURED = 1000
"""Number of samples per bucket whose caption lengths are measured."""
EXAMPLES = 3
"""Number of examples of each reject reason."""
TARS_WITH_REJECTS = 64
"""Number of units in which examples are searched."""
SMALL = 128
"""Side in pixels up to which images are enlarged without smoothing."""
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


def pick_samples(store: Store, bucket: str, count: int) -> list[dict[str, Any]]:
    """Choose `count` samples of a bucket, spread over its parts.

    The samples are split as evenly as possible among the chosen parts, and each part contributes its first samples. If
    the bucket has more than `count` parts, `count` of them contribute one sample each. If the bucket has fewer than
    `count` samples, all of them are returned.

    Raises:
        RequestError: the bucket has no samples.
    """
    root = store.where()
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
    return [
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


def reject_examples(store: Store, reasons: Iterable[str]) -> dict[str, list[dict[str, str]]]:
    """Return up to EXAMPLES rejected samples for each reason, from the first units that have rejects: their keys and
    details."""
    found: dict[str, dict[str, dict[str, str]]] = {reason: {} for reason in reasons}
    with_rejects = (tar for tar in iter_committed_tars(store) if tar.rejected)
    for tar in islice(with_rejects, TARS_WITH_REJECTS):
        tables = [read_tables(store, part.folder, part.files) for part in tar.parts.values()]
        stored = {key for samples, _ in tables for key in samples["key"]}
        for _, refused in tables:
            for key, reason, detail in zip(refused["key"], refused["reason"], refused["detail"], strict=True):
                if reason in found and key not in stored and len(found[reason]) < EXAMPLES:
                    found[reason].setdefault(key, {"key": key, "detail": detail or ""})
        if all(len(examples) == EXAMPLES for examples in found.values()):
            break
    return {reason: list(examples.values()) for reason, examples in found.items()}


def data_url(picture: Image.Image) -> str:
    """Encode an image as a `data:` URL (lossless WebP)."""
    data = io.BytesIO()
    picture.save(data, "WEBP", lossless=True)
    return "data:image/webp;base64," + base64.b64encode(data.getvalue()).decode()


def preview_page(
    store: Store, bucket: str | None, count: int, encoding: EncodingRecord, vae: Any
) -> tuple[str, dict[str, int]]:
    """Render the page.

    Args:
        bucket: the bucket to show; None: all buckets with samples.
        count: number of samples to decode in each bucket.

    Returns:
        The page as HTML, and the number of samples that it shows in each bucket.

    Raises:
        RequestError: the root or the bucket has no samples.
    """
    stats = root_stats(store, MEASURED)
    buckets = [bucket] if bucket else [name for name, size in stats["buckets"].items() if size["samples"]]
    if not buckets:
        raise RequestError(f"{store.where()} has no samples yet. Run `make precompute` first.")
    shown: list[dict[str, Any]] = []
    for name in buckets:
        samples = pick_samples(store, name, count)
        pictures = decode_pictures(samples, encoding, vae)
        rows = [
            {"key": sample["key"], "captions": captions(sample, encoding), "picture": data_url(picture)}
            for sample, picture in zip(samples, pictures, strict=True)
        ]
        shown.append({"name": name, "samples": rows})
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    page = environment.from_string(PAGE.read_text()).render(
        name=Path(store.where()).name,
        where=store.where(),
        stats=stats,
        decoder=encoding.image.weights.name,
        rejects=reject_examples(store, stats["rejected"]),
        buckets=shown,
        pixelated=all(min(Bucket.parse(name).height, Bucket.parse(name).width) <= SMALL for name in buckets),
    )
    return page, {each["name"]: len(each["samples"]) for each in shown}


def run(arguments: list[str]) -> None:
    """Run `python -m precompute.preview` with these arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m precompute.preview",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("root", help="local folder, or URL such as s3://bucket/latents")
    parser.add_argument("--bucket", help="WIDTHxHEIGHT; default: all buckets with samples")
    parser.add_argument("--samples", type=int, default=16, help="number of samples per bucket; default: 16")
    parser.add_argument("--output", default=OUTPUT, help=f"HTML file to write; default: {OUTPUT}")
    parser.add_argument("--vae", help="folder of the VAE; default: the one in encoding.json")
    options = parser.parse_args(arguments)
    if options.samples < 1:
        raise RequestError(f"--samples is {options.samples}, but must be at least 1.")
    output, store = parse_local(options.output), open_store(options.root)
    encoding = EncodingRecord.load(store)
    page, shown = preview_page(store, options.bucket, options.samples, encoding, load_decoder(encoding, options.vae))
    write_output(output, page.encode())
    print(f"{output}: {counted(sum(shown.values()), 'sample')} from {', '.join(shown)}")


main = console(run)

if __name__ == "__main__":
    main()
