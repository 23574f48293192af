"""Train the demo's small models: `python -m examples.shapes.models`. The demo itself uses the committed ones.

The command writes `vae/`, `text_encoder/` and `tokenizer/` in the layout that diffusers and transformers load.
`tests/examples/shapes/test_models.py` checks the quality of the committed ones.
"""

import argparse
from pathlib import Path

import torch

from examples.shapes.encoders.text import build_tokenizer, train_text_encoder
from examples.shapes.encoders.vae import train_vae

MODELS = Path(__file__).parent / "models"


def main() -> None:
    """Train both models.

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
    train_text_encoder(tokenizer, seed, arguments.text_steps).save_pretrained(folder / "text_encoder")
    train_vae(seed, arguments.vae_steps).to(torch.float16).save_pretrained(folder / "vae")


if __name__ == "__main__":
    main()
