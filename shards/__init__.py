"""The contract between the stages: what a latents root holds, and the code that writes, reads and checks it."""
