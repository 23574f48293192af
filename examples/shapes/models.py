"""Train the demo's small models: `python -m examples.shapes.models`. The demo itself uses the committed ones.

The command writes `vae/`, `text_encoder/` and `tokenizer/` in the layout that diffusers and transformers load, and
prints their quality on held-out images and captions.
"""

import argparse
from pathlib import Path

import numpy as np
import torch

from examples.shapes.encoders.text import accuracy, build_tokenizer, labelled_captions, train_text_encoder
from examples.shapes.encoders.vae import draw_pictures, psnr, train_vae
from examples.shapes.scenes import HELD_OUT, SEEN

MODELS = Path(__file__).parent / "models"


def main() -> None:
    """Train both models, and print their quality.

    The VAE's weights are stored as float16 to halve the file size. diffusers loads them as float32 by default.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=MODELS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--text-steps", type=int, default=400)
    parser.add_argument("--vae-steps", type=int, default=4500)
    arguments = parser.parse_args()
    folder, seed = arguments.folder, arguments.seed

    tokenizer = build_tokenizer(folder / "tokenizer")
    encoder, heads = train_text_encoder(tokenizer, seed, arguments.text_steps)
    encoder.save_pretrained(folder / "text_encoder")
    rng = np.random.default_rng([seed, 1])
    for name, combinations in (("seen", SEEN), ("held-out", tuple(sorted(HELD_OUT)))):
        captions = labelled_captions(1000, rng, combinations)
        print(f"text encoder, {name} combinations: {accuracy(tokenizer, encoder, heads, *captions)}")

    vae = train_vae(seed, arguments.vae_steps)
    for side in (64, 128):
        print(f"vae at {side} px: {psnr(vae, draw_pictures(256, side, seed + 1)):.1f} dB")
    vae.to(torch.float16).save_pretrained(folder / "vae")


if __name__ == "__main__":
    main()
