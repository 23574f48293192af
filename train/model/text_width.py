"""Networks that read projected text: their projection, the layers that read text, and conversions of these layers.

Stage 1 can project the hidden states s of a caption's tokens onto fewer dimensions, Pᵀ s (shards/format/projection.py).
In training, the network has this smaller text width. A linear layer W that reads projected text equals the layer W Pᵀ
that reads full-width text, so the trained network can be turned into a network of the original width.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shards.base.errors import RequestError
from shards.format.towers import TextTower
from train.model.inputs import States
from train.model.network import class_of, width_field


def text_projection(states: States, texts: Mapping[str, TextTower]) -> np.ndarray | None:
    """Return the matrix P, (original width, projected width) float64, that maps the network's full-width text input to
    its projected input, or None if no tower is projected.

    Args:
        states: the network's input, with its towers named.
        texts: the towers' records.
    """
    if all(texts[name].projection is None for name in states.names):
        return None
    # inner lists that share a layer are projected jointly, so the widest list's matrix contains the others'
    widest = max(states.lists, key=lambda towers: sum(texts[name].input_width for name in towers))
    blocks = [_matrix(texts[name]) for name in widest]
    return (torch.cat(blocks) if states.summed else torch.block_diag(*blocks)).numpy()


def _matrix(tower: TextTower) -> Tensor:
    if tower.projection is None:
        return torch.eye(tower.width, dtype=torch.float64)
    return torch.from_numpy(tower.projection.array.astype(np.float64))


def hash_projection(projection: np.ndarray | None) -> str | None:
    """Return the SHA-256 of a projection, or None if there is none."""
    return None if projection is None else hashlib.sha256(np.ascontiguousarray(projection).tobytes()).hexdigest()


def text_layers(fields: Mapping[str, Any], width: int) -> list[str]:
    """Return the weight names of the linear layers that read text.

    Args:
        fields: the network's config.
        width: any text width that differs from the config's.

    Raises:
        RequestError: the text also passes through something other than a linear layer, such as a norm, so a network
            trained on projected text cannot be converted to one that reads full-width text.
    """
    model_class, name = class_of(fields, "the config"), width_field(fields)
    with torch.device("meta"):
        model = model_class.from_config(fields)
        other = model_class.from_config({**fields, name: width}).state_dict()
    shapes = {key: tensor.shape for key, tensor in model.state_dict().items()}
    differing = [key for key, shape in shapes.items() if shape != other[key].shape]
    linear = {f"{key}.weight" for key, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    if others := [key for key in differing if key not in linear or shapes[key][0] != other[key].shape[0]]:
        raise RequestError(
            f"{model_class.__name__} reads text through {', '.join(others)}, which cannot be converted from projected "
            f"to full-width text. Only linear layers can. Train on a root without `text.width`."
        )
    return differing


def multiply_text_layers(weights: Mapping[str, Tensor], layers: Sequence[str], matrix: np.ndarray) -> dict[str, Tensor]:
    """Return weights in which W of each of `layers` is replaced by W `matrix`, computed in float64.

    Terms are added in a fixed order, so every machine computes the same bits.
    """
    changed = dict(weights)
    for name in set(layers) & set(weights):
        columns = weights[name].double().numpy().T
        total = np.zeros((columns.shape[1], matrix.shape[1]))
        for column, row in zip(columns, matrix, strict=True):
            total += np.outer(column, row)
        changed[name] = torch.from_numpy(total).to(weights[name].dtype)
    return changed


def conversion_matrix(old: np.ndarray | None, new: np.ndarray | None) -> np.ndarray | None:
    """Return M such that W M on text projected by `new` gives the same output as W on text projected by `old`, or None
    if none exists.

    Args:
        old, new: different projections, (original width, projected width); None: the text has full width.
    """
    if old is None or (new is not None and new.shape[0] != old.shape[0]):
        return None
    if new is None:
        return old.T
    matrix: np.ndarray = old.T @ np.linalg.pinv(new.T)  # solves W M newᵀ = W oldᵀ for all W, if that is possible
    return matrix if np.allclose(matrix @ new.T, old.T, rtol=0, atol=1e-9) else None
