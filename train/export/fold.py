"""Turn a network that was trained on projected text into one that reads full-width text."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import safe_open

from shards.base.errors import RequestError
from shards.format.towers import TextTower
from train.model.backbone import BackboneConfig
from train.model.network import width_field
from train.model.tensors import load_tensors, write_tensors
from train.model.text_width import hash_projection, multiply_text_layers, text_layers, text_projection


def fold_text(
    folder: Path, backbone: BackboneConfig, texts: Mapping[str, TextTower], trained: str | None
) -> np.ndarray | None:
    """Convert a network's folder in place to full-width text. Do nothing if its text was not projected.

    Each linear layer W that reads text becomes W Pᵀ, so for the states s of a caption's tokens, (W Pᵀ) s equals
    W (Pᵀ s), the layer's output in training.

    Args:
        folder: config.json and safetensors files of the network.
        backbone: how the network is called, with its towers named.
        texts: the towers' records.
        trained: SHA-256 of the projection on which the network was trained, from its fingerprint.

    Returns:
        The projection, (original width, projected width), or None if the text was not projected.

    Raises:
        RequestError: the root has a different projection than the one on which the network was trained.
    """
    projection = text_projection(backbone.states, texts)
    if hash_projection(projection) != trained:
        raise RequestError(
            "The run's root has a different projection of the text than the one on which the run was trained, so the "
            "network cannot be converted to full-width text. Restore the root, or at least its encoding.json."
        )
    if projection is None:
        return None
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    layers = text_layers(fields, projection.shape[0])
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            has_text = not set(layers).isdisjoint(opened.keys())
        if has_text:
            new = file.with_suffix(".new")  # the loaded tensors are memory-mapped from the old file
            write_tensors(new, multiply_text_layers(load_tensors(file), layers, projection.T))
            new.replace(file)
    path.write_text(json.dumps(fields | {width_field(fields): projection.shape[0]}, indent=2, sort_keys=True) + "\n")
    return projection
