"""Stage 2: train a latent diffusion model on the roots that stage 1 writes."""
