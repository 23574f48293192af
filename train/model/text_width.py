"""Networks that read projected text: their width in training, and the layers that read text.

Stage 1 can project the hidden states s of a caption's tokens onto fewer dimensions, Pᵀ s (shards/format/projection.py).
In training, the network has this smaller text width. A linear layer W that reads projected text equals the layer W Pᵀ
that reads whole states, so the trained network can be turned into a network of the original width.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import scipy.linalg
import torch
from torch import Tensor

from shards.base.errors import RequestError
from shards.format.towers import TextTower
from train.model.inputs import States
from train.model.network import class_of, width_field


def text_projection(states: States, texts: Mapping[str, TextTower]) -> np.ndarray | None:
    """Return P, which maps the states that the network would read if no tower were projected to those that it does
    read, (original width, width) float64, or None if no tower is projected.

    Args:
        states: the network's input, with its towers named.
        texts: the towers' records.
    """
    rows = states.towers or []
    if all(texts[name].projection is None for row in rows for name in row):
        return None
    # rows that share a layer are projected together, so the widest row's matrix contains the others'
    widest = max(rows, key=lambda row: sum(texts[name].input_width for name in row))
    blocks = [_matrix(texts[name]) for name in widest]
    return np.concatenate(blocks) if states.added else scipy.linalg.block_diag(*blocks)


def _matrix(tower: TextTower) -> np.ndarray:
    return np.eye(tower.width) if tower.projection is None else tower.projection.array.astype(np.float64)


def hash_projection(projection: np.ndarray | None) -> str | None:
    """Return the SHA-256 of a projection, or None if there is none."""
    return None if projection is None else hashlib.sha256(np.ascontiguousarray(projection).tobytes()).hexdigest()


def text_layers(fields: Mapping[str, Any], width: int) -> list[str]:
    """Return the names of the weights of a network's linear layers that read text.

    Args:
        fields: the network's config.
        width: a text width other than that in the config.

    Raises:
        RequestError: the text also passes through something other than a linear layer, such as a norm, so a network
            trained on projected text cannot be converted to one that reads whole states.
    """
    model_class, name = class_of(fields, "the config"), width_field(fields)
    with torch.device("meta"):
        here = model_class.from_config(fields)
        there = model_class.from_config({**fields, name: width}).state_dict()
    shapes = {key: tensor.shape for key, tensor in here.state_dict().items()}
    differing = [key for key, shape in shapes.items() if shape != there[key].shape]
    linear = {f"{key}.weight" for key, module in here.named_modules() if isinstance(module, torch.nn.Linear)}
    if others := [key for key in differing if key not in linear or shapes[key][0] != there[key].shape[0]]:
        raise RequestError(
            f"{model_class.__name__} reads text through {', '.join(others)}, not only through linear layers, so it "
            f"cannot be trained on projected text. Train on a root with whole states."
        )
    return differing


def change_text(weights: Mapping[str, Tensor], layers: list[str], change: np.ndarray) -> dict[str, Tensor]:
    """Return weights in which W of each of `layers` is replaced by W `change`, computed in float64."""
    matrix = torch.from_numpy(np.ascontiguousarray(change))
    return {
        name: (value.double() @ matrix).to(value.dtype) if name in layers else value for name, value in weights.items()
    }


def change_of_projection(old: np.ndarray | None, new: np.ndarray | None) -> np.ndarray | None:
    """Return the matrix M for which W M reads text that is projected by `new` exactly as W reads text that is projected
    by `old`, or None if there is no such matrix.

    Args:
        old, new: different projections, (original width, width); None: the states are whole.
    """
    if old is None or (new is not None and new.shape[0] != old.shape[0]):
        return None
    if new is None:
        return old.T
    change: np.ndarray = old.T @ np.linalg.pinv(new.T)  # solves W M newᵀ = W oldᵀ for all W, if that is possible
    return change if np.allclose(change @ new.T, old.T, rtol=0, atol=1e-9) else None
