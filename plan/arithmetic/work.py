"""FLOP counts per image, caption and step, measured on the meta device without weights, GPU or data.

torch is imported inside the functions that need it, because it is slow to import and cached plans do not use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from plan.config import Networks, TextNetwork
from shards.base.config import Config, load_config
from shards.base.durable import read_json
from shards.base.errors import RequestError
from shards.format.buckets import Bucket
from shards.format.towers import ImageTower, TextTower, Weights
from train.model.backbone import BackboneConfig
from train.model.config import Checkpointing, DdpConfig, Sharding
from train.model.flops import TRAIN_OVER_FORWARD, count_flops

if TYPE_CHECKING:
    import torch

NO_WEIGHTS = Weights(name="none", sha256="0" * 64)
"""Placeholder for the weights of networks that are built only from a config."""


@dataclass(frozen=True)
class Work:
    """FLOPs and sizes of a set of networks. FLOPs are from torch's counter; a multiply-add counts as 2."""

    num_parameters: int
    """Number of parameters of the trained network."""
    train: dict[str, int]
    """Training FLOPs per image (forward and backward) in each bucket."""
    backward: dict[str, tuple[tuple[float, float], ...]]
    """(share of the weights, share of the FLOPs) of each block in each bucket, in the order of the backward pass."""
    encode: dict[str, int]
    """Encoding FLOPs per image in each bucket."""
    caption: int
    """Encoding FLOPs per caption, summed over all text encoders."""
    image: ImageTower
    """Autoencoder, with unset storage."""
    texts: dict[str, TextTower]
    """Text encoders as defined in `networks`. `Inputs.texts` also applies the defaults in the plan's `text` section."""


class Training(Config, extra="ignore"):
    """The fields of a training config that the planner uses: the network, how GPUs exchange gradients and share
    weights, and whether activations are recomputed."""

    backbone: BackboneConfig = BackboneConfig()
    ddp: DdpConfig = DdpConfig()
    sharding: Sharding = "none"
    sharding_group: int | None = Field(None, ge=2)
    gradient_checkpointing: Checkpointing = False

    @model_validator(mode="after")
    def _names_a_network(self) -> Training:
        if self.backbone.config is None:
            raise ValueError("`backbone.config` is missing, so this is not a complete training config")
        return self

    @property
    def network(self) -> Path:
        """Diffusers config of the network to train."""
        assert self.backbone.config is not None
        return self.backbone.config

    def can_group(self, gpus: int) -> bool:
        """Return whether `gpus` GPUs can be divided into sharding groups. All of them form one group if they are fewer
        than `sharding_group`."""
        return self.sharding == "none" or gpus % min(self.sharding_group or gpus, gpus) == 0

    @property
    def gradient_bytes(self) -> int:
        """Bytes per gradient element when gradients are all-reduced; those of sharded weights are always float32."""
        return 2 if self.sharding == "none" and self.ddp.gradients == "bfloat16" else 4

    @property
    def recomputation(self) -> float:
        """Factor by which recomputation multiplies a step's FLOPs: recomputing all blocks repeats the forward pass. A
        share below 1 is not counted, because torch recomputes the cheapest operations first."""
        return 1 + 1 / TRAIN_OVER_FORWARD if self.gradient_checkpointing is True else 1.0


def count_work(networks: Networks, buckets: Iterable[str]) -> Work:
    """Build the networks on the meta device and count the FLOPs of one image in each bucket.

    Raises:
        RequestError: a config file is missing or invalid, the backbone does not accept the encoders' outputs, or a
            bucket's size is not a multiple of the VAE's downsampling.
    """
    read_configs(networks)  # fail on a wrong path before the slow import of torch
    import torch

    vae, image, encoders = build_towers(networks)
    with torch.device("meta"), torch.no_grad():
        try:
            shapes = {name: Bucket.parse(name).latent_hw(image.downsampling) for name in buckets}
        except ValueError as error:
            raise RequestError(f"data.samples: {error}. Choose a different bucket or VAE.") from None
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
        image=image,
        texts=texts,
    )


def read_training(networks: Networks) -> Training:
    """Read the training config, including its `base`.

    Raises:
        RequestError: the config is missing or invalid.
    """
    try:
        return load_config(Training, networks.backbone, [], "plan")
    except RequestError as error:
        raise RequestError(f"networks.backbone: {error}") from None


def read_configs(networks: Networks) -> list[dict[str, Any]]:
    """Read the config files of all networks, and the `backbone` section of the training config.

    Raises:
        RequestError: a file is missing or invalid.
    """
    training = read_training(networks)
    paths = [networks.vae, *(text.config for text in networks.texts.values()), str(training.network)]
    return [*map(read_json, paths), training.backbone.model_dump(mode="json")]


def network_calls(
    networks: Networks, shapes: Mapping[str, tuple[int, int]], image: ImageTower, texts: dict[str, TextTower]
) -> dict[str, tuple[torch.nn.Module, Callable[[], torch.Tensor]]]:
    """Build the trained network on the meta device, and a function for each bucket that calls it with one sample.

    Args:
        shapes: (height, width) of the latents in each bucket.

    Returns:
        Bucket → (network, function).

    Raises:
        RequestError: the network's config is missing or invalid, or the network does not accept the encoders' outputs.
    """
    from train.data.spec import DataSpec  # imports diffusers, which cached plans do not need
    from train.model.fit import check_fit, dry_call
    from train.model.network import build_network

    training, data = read_training(networks), DataSpec(image, texts, {}, {}, (), 1)
    network, backbone = build_network(training.network, None), training.backbone.resolved(texts)
    check_fit(network, data, backbone)
    return {name: dry_call(network, backbone, data, hw) for name, hw in shapes.items()}


def count_by_block(network: torch.nn.Module, call: Callable[[], Any]) -> tuple[int, tuple[tuple[float, float], ...]]:
    """Count the FLOPs of a forward pass in total and by block.

    Returns:
        The FLOPs of `call`, and (share of the weights, share of the FLOPs) of each block of `network` in the order of
        the backward pass, rounded to four digits. Blocks whose shares both round to zero are omitted.
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


def build_towers(networks: Networks) -> tuple[Any, ImageTower, dict[str, tuple[Any, TextTower]]]:
    """Build the encoders without weights.

    Returns:
        The autoencoder with its record, and the text encoders with their records, by name.
    """
    import torch

    with torch.device("meta"), torch.no_grad():
        vae, image = build_image_tower(networks.vae)
        return vae, image, {name: build_text_tower(name, tower) for name, tower in networks.texts.items()}


def build_image_tower(path: str) -> tuple[Any, ImageTower]:
    """Build the autoencoder from a config file, and the record that would describe it in a latents root."""
    from shards.format.models import probe_autoencoder  # imports the hub's client, which cached plans do not need
    from train.model.network import BUILD_ERRORS

    fields = read_json(path)
    class_name = str(fields.get("_class_name", "AutoencoderKL"))
    try:
        vae, has_posterior, channels, downsampling = probe_autoencoder(class_name, fields)
    except BUILD_ERRORS as error:
        raise RequestError(
            f"networks.vae: diffusers cannot build an autoencoder of the class {class_name} from {path}: {error}. Set "
            f"it to the config.json of a diffusers autoencoder."
        ) from error
    return vae, ImageTower(
        class_name=class_name,
        weights=NO_WEIGHTS,
        posterior="moments" if has_posterior else "deterministic",
        channels=channels,
        downsampling=downsampling,
        scale=(1.0,) * channels,
        shift=(0.0,) * channels,
        crop="",
        resampling="",
        decoder="",
    )


def build_text_tower(name: str, text: TextNetwork) -> tuple[Any, TextTower]:
    """Build a text encoder from its config file, and the record that would describe it in a latents root."""
    import transformers

    fields = read_json(text.config)
    try:
        config: Any = transformers.AutoConfig.for_model(**{"model_type": "clip_text_model", **fields})
        model = getattr(transformers, text.class_name)(config)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RequestError(
            f"networks.texts.{name}: transformers cannot build the class {text.class_name} from {text.config}: "
            f"{error}. Set `class_name` and `config` to the class and the config.json of the same model."
        ) from error
    config = getattr(config, "encoder", None) or config.get_text_config()
    max_tokens = text.max_tokens or getattr(config, "max_position_embeddings", None)
    if max_tokens is None:
        raise RequestError(
            f"networks.texts.{name}.max_tokens is not set, and {text.config} states no maximum length. Set it to the "
            f"number of tokens, including padding."
        )
    projected = text.class_name.endswith("WithProjection")
    return model, TextTower(
        class_name=text.class_name,
        weights=NO_WEIGHTS,
        tokenizer=NO_WEIGHTS,
        max_tokens=max_tokens,
        masked=text.masked,
        states=text.states,
        length=text.length or max_tokens,
        width=int(config.hidden_size),
        pooled=int(config.projection_dim if projected else config.hidden_size) if text.pooled else 0,
        storage=text.storage or "float16",
        trim=bool(text.trim) and text.states,
    )
