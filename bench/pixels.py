"""Compare stage 1's pixel path with a plain one: `python -m bench.pixels [--pictures 96] [--seed 0] [--rounds 5]`.

The plain path, for every bucket: full decode by Pillow, bicubic resize, center crop, conversion to float32 in [-1, 1].
Ours: a single `decode` of precompute/pixels to uint8; the device does the rest. Both run on one thread, in turn. The
corpus is synthetic and seeded: 1/f noise, dead leaves (edges at all scales) and fine texture, as JPEGs of quality 75 to
95 in 4:2:0 and 4:4:4.
"""

import argparse
import io
from collections.abc import Iterable
from functools import partial

import numpy as np
import torch
from PIL import Image, ImageDraw

from bench.kit.common import section, table, timed_in_turn
from precompute.pixels.decode import LimitsConfig, PixelsConfig, decode
from precompute.pixels.resample import place
from shards.format.buckets import Bucket

BUCKETS = [Bucket(256, 256), Bucket(512, 512)]
ASPECTS = (1.0, 4 / 3, 3 / 2, 16 / 9, 3 / 4, 2 / 3, 9 / 16)
MARGINS = (1.0, 1.25, 1.5, 2.0)


def pink_noise(rng: np.random.Generator, width: int, height: int, exponent: float) -> np.ndarray:
    """Draw noise (height, width, 3) whose amplitude falls as 1/f^exponent, correlated between channels."""
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None, :])
    frequency[0, 0] = np.inf

    def plane() -> np.ndarray:
        phases = rng.standard_normal((2, *frequency.shape))
        noise = np.fft.irfft2((phases[0] + 1j * phases[1]) / frequency**exponent, (height, width))
        return noise / noise.std()

    luma = plane()
    return np.stack([luma + 0.3 * plane() for _ in range(3)], axis=-1)


def photograph(rng: np.random.Generator, width: int, height: int) -> Image.Image:
    """Draw an image with the statistics of a photograph."""
    canvas = Image.new("RGB", (2 * width, 2 * height), "grey")
    draw = ImageDraw.Draw(canvas)
    smallest, largest = max(width, height) / 40, max(width, height) / 1.5
    # dead leaves, each of which covers those below it; p(radius) ~ radius⁻³
    radii = (smallest**-2 + rng.random(600) * (largest**-2 - smallest**-2)) ** -0.5
    for radius in np.sort(radii)[::-1]:
        x, y = rng.uniform(0, 2 * width), rng.uniform(0, 2 * height)
        color = tuple(rng.normal(128, 45, 3).clip(0, 255).astype(int).tolist())
        if rng.random() < 0.5:
            draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=color)
        else:
            corners = rng.uniform(0, 2 * np.pi) + np.array([0, 1.5, 3.2, 4.6])
            points = np.stack([x + radius * np.cos(corners), y + radius * np.sin(corners)], axis=-1)
            draw.polygon([(px, py) for px, py in points.tolist()], fill=color)
    leaves = np.asarray(canvas.reduce(2), np.float64)
    pixels = leaves + 14 * pink_noise(rng, width, height, 1.2)
    # fine texture on one part: stripes near the sampling limit
    texture = 8 * np.sin(np.arange(width) * rng.uniform(0.5, 2.0) + rng.uniform(0.1, 1.0) * np.arange(height)[:, None])
    pixels[height // 2 :, : width // 2] += texture[height // 2 :, : width // 2, None]
    return Image.fromarray(pixels.clip(0, 255).round().astype(np.uint8))


def make_corpus(num_pictures: int, seed: int, shortest: int = 300, longest: int = 1600) -> list[bytes]:
    """Draw JPEGs whose longer side is uniform between `shortest` and `longest`, all fitting the smallest bucket."""
    rng = np.random.default_rng(seed)
    corpus: list[bytes] = []
    while len(corpus) < num_pictures:
        side, aspect = int(rng.integers(shortest, longest + 1)), float(rng.choice(ASPECTS))
        width, height = (side, round(side / aspect)) if aspect >= 1 else (round(side * aspect), side)
        if min(width, height) < min(BUCKETS).width:
            continue
        file = io.BytesIO()
        subsampling = int(rng.choice([0, 2]))  # 4:4:4 or 4:2:0
        photograph(rng, width, height).save(file, "JPEG", quality=int(rng.integers(75, 96)), subsampling=subsampling)
        corpus.append(file.getvalue())
    return corpus


def plain(data: bytes, bucket: Bucket) -> np.ndarray:
    """Decode, resize and crop an image by the plain path: (height, width, 3) float32 in [-1, 1]."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    at = place(*image.size, bucket)
    image = image.resize((at.scaled_width, at.scaled_height), Image.Resampling.BICUBIC)
    image = image.crop((at.left, at.top, at.left + bucket.width, at.top + bucket.height))
    pixels = np.asarray(image).astype(np.float32)
    pixels /= 127.5
    pixels -= 1
    return pixels


def size_of(data: bytes) -> tuple[int, int]:
    """Read the image size (width, height) from the header."""
    return Image.open(io.BytesIO(data)).size


def run_plain(corpus: Iterable[bytes]) -> None:
    """Process every bucket of every image by the plain path, with one decode per bucket."""
    for data in corpus:
        size = size_of(data)
        for bucket in BUCKETS:
            if bucket.fits(*size):
                plain(data, bucket)


def run_ours(corpus: Iterable[bytes], config: PixelsConfig) -> None:
    """Process every bucket of every image by our path, with one decode per image."""
    for data in corpus:
        decode(data, BUCKETS, config, LimitsConfig())


def psnr(corpus: Iterable[bytes], config: PixelsConfig) -> dict[Bucket, np.ndarray]:
    """Return bucket → PSNR of our path against the plain one, in dB, for each image."""
    found: dict[Bucket, list[float]] = {bucket: [] for bucket in BUCKETS}
    for data in corpus:
        for bucket, pixels in decode(data, BUCKETS, config, LimitsConfig()).pixels.items():
            reference = (plain(data, bucket).astype(np.float64) + 1) * 127.5
            error = ((pixels - reference) ** 2).mean()
            found[bucket].append(10 * np.log10(255**2 / max(error, 1e-4)))
    return {bucket: np.array(values) for bucket, values in found.items()}


def quality_row(name: str, values: np.ndarray) -> list[object]:
    """Format the number of images, and their mean, 5th percentile and minimum in dB."""
    figures = (values.mean(), np.percentile(values, 5), values.min())
    return [name, str(len(values)), *(f"{figure:.1f}" for figure in figures)]


def main() -> None:
    """Time both paths on small and on large images, and compare their outputs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=int, default=96)
    parser.add_argument("--large", type=int, default=24, help="images of 1600 to 4000 px, for scaled decoding")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = PixelsConfig()

    corpus = make_corpus(options.pictures, options.seed)
    large = make_corpus(options.large, options.seed + 1, 1600, 4000)
    rows = []
    for name, group in {"300 to 1600": corpus, "1600 to 4000": large}.items():
        pair = timed_in_turn(partial(run_ours, group, config), partial(run_plain, group), options.rounds)
        per_second = (f"{len(group) / min(seconds):.0f}" for seconds in (pair.second_seconds, pair.first_seconds))
        rows.append([name, len(group), *per_second, f"{pair.ratio:.2f}", pair.spread])
    timing = table(["longer side", "images", "plain, images/s", "ours, images/s", "ratio", "lowest and highest"], rows)
    quality = psnr(corpus, config)
    rows = [quality_row(f"300 to 1600, {bucket}", values) for bucket, values in quality.items()]
    for margin in MARGINS:
        found = psnr(large, PixelsConfig(decode_margin=margin))
        rows += [quality_row(f"1600 to 4000, margin {margin:g}, {bucket}", values) for bucket, values in found.items()]
    body = timing + "\n\n" + table(["PSNR against plain", "images", "mean dB", "5 % dB", "lowest dB"], rows)
    bits = 8 * sum(map(len, corpus)) / sum(np.prod(size_of(data)) for data in corpus)
    body += f"\n\nThe corpus has {len(corpus)} JPEGs with {bits:.2f} bits per pixel."
    print(section("Pixel path", "bench.pixels", body))


if __name__ == "__main__":
    main()
