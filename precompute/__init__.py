"""Stage 1: LAION metadata → selected rows → tars → a latents root."""
