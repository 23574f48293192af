"""Stage 2: training a latent diffusion model on the roots that stage 1 writes."""
