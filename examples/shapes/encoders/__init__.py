"""Training of the demo's small VAE and text encoder, whose weights are committed in `models/`."""
