"""The training objective: from a batch of stored latents to a loss."""
