"""Stage 2: a latents root → a U-Net. `accelerate launch -m train --config configs/phase1.yaml`."""
