"""Stage 2: a latents root → a U-Net. `python -m train.launch -m train --config configs/phase1.yaml`."""
