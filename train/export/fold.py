"""Turn a network that was trained on projected text into one that reads the text encoder's whole states."""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open

from shards.format.towers import TextTower
from train.model.backbone import BackboneConfig
from train.model.network import width_field
from train.model.tensors import load_tensors, write_tensors
from train.model.text_width import change_text, text_layers, text_projection


def fold_text(folder: Path, backbone: BackboneConfig, texts: Mapping[str, TextTower]) -> None:
    """Convert a network's folder in place. Nothing changes if the network was trained on whole states.

    Each linear layer W that reads text becomes W Pᵀ, so for the states s of a caption's tokens, (W Pᵀ) s equals
    W (Pᵀ s), the layer's output in training.

    Args:
        folder: config.json and safetensors files of the network.
        backbone: how the network is called, with its towers named.
        texts: the towers' records.
    """
    projection = text_projection(backbone.states, texts)
    if projection is None:
        return
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    layers = text_layers(fields, projection.shape[0])
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            has_text = not set(layers).isdisjoint(opened.keys())
        if has_text:
            new = file.with_suffix(".new")  # the loaded tensors are mapped from the file
            write_tensors(new, change_text(load_tensors(file), layers, projection.T))
            new.replace(file)
    path.write_text(json.dumps(fields | {width_field(fields): projection.shape[0]}, indent=2, sort_keys=True) + "\n")
