"""Stage 1: captioned images → a latents root; also selects and downloads images from tables of URLs."""
