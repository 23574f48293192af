"""Sampling into committed parts against a bare diffusers loop of one batch size: `python -m bench.outputs.sampling`.

Both draw the same pictures; the loop keeps them in memory, the product encodes, hashes and commits them as well.
"""

import argparse
import tempfile
from pathlib import Path

import torch

from bench.kit.common import machine, timed_in_turn
from evaluation.parts import commit_part
from evaluation.sampling.job import describe_drawing, list_samples
from evaluation.sampling.noise import initial_noise
from evaluation.sampling.pipeline import load_pipeline
from evaluation.sampling.prompts import Prompt
from evaluation.sampling.settings import SamplingConfig
from evaluation.sampling.worker import PICTURES, SamplePart, draw_part
from shards.format.buckets import Bucket
from shards.open import open_store


def main() -> None:
    """Time both in turn, and print a table."""
    parser = argparse.ArgumentParser(prog="bench.outputs.sampling", description=__doc__)
    parser.add_argument("pipeline", type=Path, help="a diffusers pipeline's folder, such as runs/demo/phase2/export")
    parser.add_argument("--size", default="128x128")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--pictures", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    config = SamplingConfig(size=options.size, steps=[options.steps], batch_size=options.batch_size)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pipeline = load_pipeline(options.pipeline, device, "float32")
    prompts = [Prompt(str(number), f"a red circle, number {number}") for number in range(options.pictures)]
    drawing = describe_drawing(options.pipeline, prompts, config, config.grid[0])
    samples = list_samples(prompts, 1)
    bucket = Bucket.parse(config.size)
    shape = (pipeline.unet.config.in_channels, *bucket.latent_hw(pipeline.vae_scale_factor))

    def bare() -> None:
        for start in range(0, len(prompts), config.batch_size):
            batch = prompts[start : start + config.batch_size]
            noise = torch.stack([initial_noise(0, prompt.id, 0, shape) for prompt in batch])
            pipeline(
                [prompt.text for prompt in batch],
                height=bucket.height,
                width=bucket.width,
                num_inference_steps=options.steps,
                guidance_scale=config.guidance[0],
                latents=noise,
                output_type="pil",
            )

    def ours() -> None:
        with tempfile.TemporaryDirectory() as folder:
            part = SamplePart("00000", Path(folder), drawing, tuple(samples))
            commit_part(
                open_store(folder),
                PICTURES,
                part.name,
                lambda private: draw_part(part, pipeline, config.batch_size, lambda count: None, private),
            )

    pair = timed_in_turn(ours, bare, options.rounds)
    what = f"{options.pictures} pictures of {config.size}, {options.steps} steps, batch {config.batch_size}"
    print(f"## Sampling\n\n`python -m bench.outputs.sampling`, {machine()}: {what}.\n")
    print(f"Speed of the product ÷ that of the bare loop: {pair.ratio:.3f} ({pair.spread}, {options.rounds} rounds).")


if __name__ == "__main__":
    main()
