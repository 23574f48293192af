"""How much arithmetic one image, caption or step is, counted on the meta device: no weights, no GPU, no data.

torch is imported inside the functions that need it: reading a config or a root must not cost its import.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from plan.config import Networks, TextNetwork
from shards.base.errors import RequestError
from shards.format.buckets import Bucket
from shards.format.towers import ImageTower, TextTower, Weights
from train.model.flops import TRAIN_OVER_FORWARD, count_flops

if TYPE_CHECKING:
    import torch

UNKNOWN = Weights(name="none", sha256="0" * 64)
PROBE_SIDE = 256


@dataclass(frozen=True)
class Work:
    """FLOPs by torch's counter, one multiply-add being 2, and sizes."""

    num_parameters: int
    """Of the network that is trained."""
    train: dict[str, int]
    """Bucket → FLOPs of one image's training step."""
    backward: dict[str, tuple[tuple[float, float], ...]]
    """Bucket → shares of the weights and of the arithmetic, block by block, as a backward pass comes past them."""
    encode: dict[str, int]
    """Bucket → FLOPs of one picture's encoding."""
    caption: int
    """FLOPs of one caption's encoding, by all text towers."""
    latent_hw: dict[str, tuple[int, int]]
    latent_channels: int
    has_posterior: bool
    texts: dict[str, TextTower]
    """As `networks` says alone; `Inputs.texts` knows of the plan's `text` too."""


def count_work(networks: Networks, buckets: Iterable[str]) -> Work:
    """Build the networks without weights and count one image of each bucket through them.

    Raises:
        RequestError: a config file is missing or is no JSON, the network does not fit the encoders, or a bucket does
            not suit the VAE.
    """
    read_configs(networks)  # before torch is imported: a wrong path is refused at once
    import torch

    with torch.device("meta"), torch.no_grad():
        vae, image = _image_tower(networks.vae)
        encoders = {name: _text_tower(name, tower) for name, tower in networks.texts.items()}
        shapes = {name: _latent_hw(name, image.downsampling) for name in buckets}
        pictures = {name: (Bucket.parse(name).height, Bucket.parse(name).width) for name in shapes}
        encode = {name: count_flops(vae.encode, torch.empty(1, 3, *hw)) for name, hw in pictures.items()}
        caption = sum(
            count_flops(model, torch.empty(1, tower.max_tokens, dtype=torch.long)) for model, tower in encoders.values()
        )
    texts = {name: tower for name, (_, tower) in encoders.items()}
    calls = network_calls(networks, shapes, image, texts)
    counted = {name: count_by_block(*call) for name, call in calls.items()}
    network, _ = next(iter(calls.values()))
    return Work(
        num_parameters=sum(parameter.numel() for parameter in network.parameters()),
        train={name: TRAIN_OVER_FORWARD * flops for name, (flops, _) in counted.items()},
        backward={name: blocks for name, (_, blocks) in counted.items()},
        encode=encode,
        caption=caption,
        latent_hw=shapes,
        latent_channels=image.channels,
        has_posterior=image.posterior != "deterministic",
        texts=texts,
    )


def read_configs(networks: Networks) -> list[dict[str, Any]]:
    """Read every config file that `networks` names.

    Raises:
        RequestError: one is missing, or is no JSON.
    """
    texts = [text.config for text in networks.texts.values()]
    return [_read_json(path) for path in (networks.vae, *texts, _backbone(networks)[1])]


def network_calls(
    networks: Networks, shapes: Mapping[str, tuple[int, int]], image: ImageTower, texts: dict[str, TextTower]
) -> dict[str, tuple[torch.nn.Module, Callable[[], torch.Tensor]]]:
    """Bucket → the network that is trained, on the meta device, and a call of it for one sample.

    Args:
        shapes: bucket → its latents' height and width.

    Raises:
        RequestError: the network's config is missing or is no JSON, or does not fit the encoders.
    """
    import torch

    from train.data.spec import DataSpec  # with diffusers, which a report alone does not need
    from train.model.fit import check_fit, on_meta
    from train.model.unet import class_of

    backbone, path = _backbone(networks)
    fields, data = _read_json(path), DataSpec(image, texts, {}, {}, (), 1)
    with torch.device("meta"), torch.no_grad():
        network = class_of(fields, path).from_config(fields)
    backbone = backbone.resolved(texts)
    check_fit(network, data, backbone)
    return {name: on_meta(network, backbone, data, hw) for name, hw in shapes.items()}


def count_by_block(network: torch.nn.Module, call: Callable[[], Any]) -> tuple[int, tuple[tuple[float, float], ...]]:
    """Count the FLOPs of a forward pass, and describe the backward pass block by block, in its order.

    Returns:
        FLOPs of `call`, and (share of the weights, share of the FLOPs) of each block of `network`, from the last block
        that `call` runs to the first. Blocks whose shares both round to 0.0000 are left out.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    blocks: dict[str, torch.nn.Module] = {}
    for name, child in network.named_children():
        parts = child.named_children() if isinstance(child, torch.nn.ModuleList) else [("", child)]
        blocks |= {f"{name}.{part}".rstrip("."): module for part, module in parts}
    order: list[str] = []
    hooks = [
        block.register_forward_pre_hook(lambda *_, name=name: order.append(name)) for name, block in blocks.items()
    ]
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        call()
    for hook in hooks:
        hook.remove()
    flops = {
        name: sum(counter.get_flop_counts().get(f"{type(network).__name__}.{name}", {}).values()) for name in order
    }
    weights = {name: sum(parameter.numel() for parameter in blocks[name].parameters()) for name in order}
    total_weights, total_flops = sum(weights.values()), sum(flops.values())
    run_backward = reversed(dict.fromkeys(order))
    shares = [(round(weights[name] / total_weights, 4), round(flops[name] / total_flops, 4)) for name in run_backward]
    return counter.get_total_flops(), tuple(share for share in shares if any(share))


def _backbone(networks: Networks) -> tuple[Any, str]:
    """How the network is called, and its config file."""
    from train.model.backbone import BackboneConfig

    section = _read(networks.backbone, yaml.safe_load).get("backbone", {})
    backbone = BackboneConfig.model_validate(section)
    return backbone, str(backbone.config)


def _image_tower(path: str) -> tuple[Any, ImageTower]:
    """The autoencoder of a config file, and what a root says of it."""
    import diffusers
    import torch

    fields = _read_json(path)
    class_name = str(fields.get("_class_name", "AutoencoderKL"))
    vae: Any = getattr(diffusers, class_name).from_config(fields)
    encoded = vae.encode(torch.empty(1, 3, PROBE_SIDE, PROBE_SIDE))
    has_posterior = hasattr(encoded, "latent_dist")
    latents = encoded.latent_dist.mode() if has_posterior else encoded.latent
    channels = int(latents.shape[1])
    return vae, ImageTower(
        class_name=class_name,
        weights=UNKNOWN,
        posterior="moments" if has_posterior else "deterministic",
        channels=channels,
        downsampling=PROBE_SIDE // int(latents.shape[-1]),
        scale=(1.0,) * channels,
        shift=(0.0,) * channels,
        crop="",
        resampling="",
        decoder="",
    )


def _text_tower(name: str, asked: TextNetwork) -> tuple[Any, TextTower]:
    """The text model of a config file, and what a root says of it."""
    import transformers

    fields = _read_json(asked.config)
    try:
        config: Any = transformers.AutoConfig.for_model(**{"model_type": "clip_text_model", **fields})
        model = getattr(transformers, asked.class_name)(config)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RequestError(
            f"networks.texts.{name}: transformers cannot make a {asked.class_name} of {asked.config}: {error}. Give "
            f"the class and the config.json of one model."
        ) from error
    config = getattr(config, "encoder", None) or config.get_text_config()
    max_tokens = asked.max_tokens or int(config.max_position_embeddings)
    projected = asked.class_name.endswith("WithProjection")
    return model, TextTower(
        class_name=asked.class_name,
        weights=UNKNOWN,
        tokenizer=UNKNOWN,
        max_tokens=max_tokens,
        masked=asked.masked,
        states=asked.states,
        length=asked.length or max_tokens,
        width=int(config.hidden_size),
        pooled=int(config.projection_dim if projected else config.hidden_size) if asked.pooled else 0,
        storage=asked.storage or "float16",
        trim=bool(asked.trim) and asked.states,
    )


def _latent_hw(bucket: str, downsampling: int) -> tuple[int, int]:
    try:
        return Bucket.parse(bucket).latent_hw(downsampling)
    except ValueError as error:
        raise RequestError(f"{error}. Choose another bucket or another VAE.") from None


def _read_json(path: str) -> dict[str, Any]:
    return _read(path, json.loads)


def _read(path: str, parse: Any) -> dict[str, Any]:
    try:
        found: dict[str, Any] = parse(Path(path).read_text())
    except FileNotFoundError:
        raise RequestError(
            f"There is no network config {path}. Give the config.json of a diffusers or transformers model "
            f"in `networks`."
        ) from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise RequestError(f"The network config {path} cannot be read as JSON: {error}.") from None
    return found
