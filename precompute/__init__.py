"""Stage 1: tars of captioned pictures → a latents root. `python -m precompute --config configs/precompute.yaml`."""
