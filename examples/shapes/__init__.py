"""The demo (`make demo`): both stages on a synthetic world with one coloured shape per image."""
