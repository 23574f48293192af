"""The training objective, which computes a loss from a batch of stored latents."""
