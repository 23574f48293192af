"""What each text storage costs and keeps: `python -m bench.outputs.text_storage`, for docs/evidence/text-storage.md.

Error per token and bytes per sample are measured on MDS files, for the demo's trained text encoder on its own captions,
and for one of Stable Diffusion 2's shape with random weights. The change in validation loss is that of a small U-Net
(`bench/outputs/text_unet.py`).
"""

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from bench.kit.common import machine, table
from bench.kit.roots import encoding_record
from bench.outputs.text_unet import unet_table
from examples.shapes.captions import write_caption
from examples.shapes.models import MODELS
from examples.shapes.scenes import sample_scene
from shards.format.buckets import Bucket
from shards.format.encoding import EncodingRecord
from shards.format.text import TextLatents, TextStorage
from shards.format.towers import ONLY_TEXT
from shards.root.reading import read_part, text_latents
from shards.root.writing import Caption, PartWriter, Sample

STORAGES: list[tuple[TextStorage, bool]] = [("float16", False), ("float8", False), ("float16", True), ("float8", True)]


def name_of(storage: TextStorage, trim: bool) -> str:
    """`float8, trim`."""
    return f"{storage}, trim" if trim else storage


@dataclass(frozen=True)
class Encoded:
    """Captions as a text encoder left them: float32 hidden states (N, tokens, width), and real tokens of each."""

    encoder: str
    bucket: str
    latents: Tensor
    num_tokens: list[int]


@torch.inference_mode()
def demo_captions(count: int) -> Encoded:
    """The demo's text encoder on captions of its world."""
    tokenizer = CLIPTokenizer.from_pretrained(MODELS / "tokenizer")
    model = CLIPTextModel.from_pretrained(MODELS / "text_encoder", torch_dtype=torch.float32).eval()
    length = model.config.max_position_embeddings
    options = {"padding": "max_length", "max_length": length, "truncation": True, "return_tensors": "pt"}
    tokens = tokenizer(captions_of_world(count, seed=1), **options)
    latents = model(tokens.input_ids).last_hidden_state  # float32: what stage 1 returns is float16
    return Encoded("demo's, trained: 24 × 64", "64x64", latents, tokens.attention_mask.sum(dim=1).tolist())


@torch.inference_mode()
def sd2_shaped_captions(config: Path, count: int) -> Encoded:
    """A text encoder of SD2's shape with random weights, on random words, as many as the demo's captions have."""
    torch.manual_seed(0)
    model = CLIPTextModel(CLIPTextConfig.from_json_file(config)).eval()
    length, end = model.config.max_position_embeddings, model.config.vocab_size - 1
    num_tokens = demo_captions(count).num_tokens
    ids = torch.randint(1, end - 1, (count, length))
    ids[:, 0] = end - 1
    for row, tokens in zip(ids, num_tokens, strict=True):
        row[tokens - 1 :] = end
    latents = torch.cat([model(part).last_hidden_state for part in ids.split(8)])
    return Encoded("SD2's shape, random: 77 × 1024", "256x256", latents, num_tokens)


def captions_of_world(count: int, seed: int) -> list[str]:
    """Captions of random scenes."""
    rng = np.random.default_rng(seed)
    return [write_caption(sample_scene(rng), rng) for _ in range(count)]


def storage_row(encoded: Encoded, storage: TextStorage, trim: bool, folder: Path) -> list[str]:
    """Write the captions as a part, read them back, and compare."""
    encoding = bench_encoding(encoded, storage, trim)
    bucket = Bucket.parse(encoded.bucket)
    writer = PartWriter(folder, encoding, bucket)
    image = torch.zeros(encoding.image.num_planes, *bucket.latent_hw(8))
    for i, (latents, num_tokens) in enumerate(zip(encoded.latents, encoded.num_tokens, strict=True)):
        caption = Caption(f"caption {i}", {ONLY_TEXT: TextLatents(latents, num_tokens)}, frozenset())
        writer.write(Sample(f"{i:09d}", [caption], image, (256, 256, 0, 0), np.zeros(4, np.float32)))
    count = len(writer.finish().stored)
    errors, cosines, text_bytes = [], [], 0
    for sample, exact in zip(read_part(folder), encoded.latents, strict=True):
        stored = torch.tensor(text_latents(sample, encoding)[0][ONLY_TEXT]).double()
        kept = exact[: len(stored)].double()
        errors.append((stored - kept).norm(dim=1) / kept.norm(dim=1))
        cosines.append(1 - torch.cosine_similarity(stored, kept, dim=1))
        text_bytes += sum(array.nbytes for name, array in sample.items() if name.startswith("text_"))
    on_disk = sum(path.stat().st_size for path in folder.glob("*.mds"))
    figures = [*spread(torch.cat(errors)), *spread(torch.cat(cosines))]
    return [encoded.encoder, name_of(storage, trim), *figures, f"{text_bytes / count:,.0f}", f"{on_disk / count:,.0f}"]


def bench_encoding(encoded: Encoded, storage: TextStorage, trim: bool) -> EncodingRecord:
    """An encoding record without models."""
    _, length, width = encoded.latents.shape
    return encoding_record(length, width, storage=storage, trim=trim)


def spread(values: Tensor) -> list[str]:
    """Mean, 99th percentile and maximum."""
    return [f"{v:.1e}" for v in (values.mean(), torch.quantile(values, 0.99), values.max())]


def main() -> None:
    """Both measurements, as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--captions", type=int, default=1000, help="of the demo's text encoder")
    parser.add_argument("--sd2-captions", type=int, default=16, help="of the text encoder of SD2's shape")
    parser.add_argument("--sd2-config", type=Path, default=Path("configs/text_encoder/sd2.json"))
    parser.add_argument("--samples", type=int, default=1024, help="pictures that the U-Net is trained on")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(machine() + "\n", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        encoders = [demo_captions(options.captions), sd2_shaped_captions(options.sd2_config, options.sd2_captions)]
        rows = [
            storage_row(encoded, *how, folder / f"part-{i}-{j}")
            for i, encoded in enumerate(encoders)
            for j, how in enumerate(STORAGES)
        ]
        of = ("mean", "p99", "max")
        header = [
            "text encoder",
            "storage",
            *(f"L2 {x}" for x in of),
            *(f"1−cos {x}" for x in of),
            "text B",
            "B on disk",
        ]
        print(table(header, rows) + "\n", flush=True)
        storages = {name_of(*how): {"text": dict(zip(("storage", "trim"), how, strict=True))} for how in STORAGES}
        print(unet_table(folder, storages, options.samples, options.steps, options.seeds, captions=True))


if __name__ == "__main__":
    main()
