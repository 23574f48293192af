"""Checks that a network fits the latents, by comparing their configs and by calling the network without weights."""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from shards.base.errors import RequestError
from shards.format.buckets import Bucket
from shards.format.encoding import EncodingRecord
from train.data.spec import DataSpec
from train.model.backbone import BackboneConfig
from train.model.inputs import Pooled, example
from train.model.network import BUILD_ERRORS, CLASSES, class_name, class_of, same

EXTRA_INPUTS: dict[str, tuple[str | None, ...]] = {
    "class_embed_type": (None,),
    "num_class_embeds": (None,),
    "addition_embed_type": (None, "text", "text_time"),
    "encoder_hid_dim_type": (None, "text_proj"),
}
"""U-Net config fields that make the network require additional inputs, and the values for which this trainer can
provide these inputs."""
STANDARD_ARGUMENTS = ("timestep", "return_dict")
"""Arguments with which every network is called, in addition to the latents."""


def check_fit(network: Any, spec: DataSpec, backbone: BackboneConfig, validation: str | None = None) -> None:
    """Check that the network's arguments, channels, widths and patch size fit the latents, and call it on meta tensors.

    Args:
        backbone: how the network is called, with its text towers named.
        validation: bucket to validate on.

    Raises:
        RequestError: the network does not fit. The message lists all mismatches.
    """
    shapes = {stream.config.bucket: stream.latent_hw for stream in spec.streams}
    if validation is not None:
        shapes[validation] = Bucket.parse(validation).latent_hw(spec.image.downsampling)
    problems = [
        *_argument_problems(network, backbone),
        *_channel_problems(network.config, spec, backbone),
        *_text_problems(network, spec, backbone),
        *_side_problems(network.config, shapes, backbone),
    ]
    if not problems:
        problems = [*_call_problems(network, spec, set(shapes.values()), backbone)]
    if problems:
        what = "U-Net" if _is_unet(network.config) else class_name(network.config)
        raise RequestError(
            f"The {what} does not fit the latents: {'; '.join(problems)}. Set `backbone.config` to a network that fits "
            f"them, or train on a different root."
        )


def check_precision(network: Any, precision: str) -> None:
    """Check that the network's class is not known to overflow in this precision.

    Raises:
        RequestError: backbones.yaml lists the precision as unsafe for the network's class.
    """
    reason = (_class_facts(network).get("refused_precisions") or {}).get(precision)
    if reason is not None:
        raise RequestError(
            f"precision {precision} does not work for {class_name(network.config)}: {reason}. Set `precision` to "
            f"bfloat16 or float32."
        )


def dry_call(
    network: Any,
    backbone: BackboneConfig,
    data: DataSpec | EncodingRecord,
    latent_hw: tuple[int, int],
    num_samples: int = 1,
    device: str = "meta",
) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """Return a copy of the network on the meta device, and a function that calls it on samples created on `device`.

    By default, a call computes only shapes. Nothing but the config of `network` is used.
    """
    target = (latent_hw[0] * data.image.downsampling, latent_hw[1] * data.image.downsampling)
    with torch.device("meta"):
        copy: nn.Module = class_of(network.config, "the config").from_config(network.config)

    def call() -> torch.Tensor:
        with torch.device(device):
            latents = torch.empty(num_samples, data.image.channels, *latent_hw)
            conditioning = example(data.texts, target, num_samples)
            return backbone.predict(copy, latents, torch.empty(num_samples), conditioning)

    return copy, call


def _is_unet(config: Mapping[str, Any]) -> bool:
    return "block_out_channels" in config


def _class_facts(network: Any) -> dict[str, Any]:
    """Return the entry for the network's class in backbones.yaml."""
    return CLASSES[class_name(network.config)]


def _argument_problems(network: Any, backbone: BackboneConfig) -> Iterator[str]:
    """List inputs that the network does not accept, and inputs that it requires but `backbone.inputs` lacks."""
    config = network.config
    parameters = list(inspect.signature(type(network).forward).parameters)[1:]
    free = [name for name in parameters[1:] if name not in STANDARD_ARGUMENTS]  # the first receives the latents
    for name in backbone.top_arguments:
        if name not in parameters:
            yield f"backbone.inputs names the argument {name}, which the network lacks (it has {', '.join(free)})"
        elif name not in free:
            yield f"backbone.inputs names the argument {name}, which the trainer sets itself"
    for name, required_by in (_class_facts(network).get("needs") or {}).items():
        if name in backbone.top_arguments:
            continue
        if required_by is None:
            yield f"it requires the input {name}, which backbone.inputs does not name"
            continue
        for field, value in required_by.items():
            if config.get(field) == value:
                yield f"with {field} {value}, it requires the input {name}, which backbone.inputs does not name"
    for field, supported in EXTRA_INPUTS.items():
        if config.get(field) not in supported:
            yield f"with {field} {config[field]}, it requires inputs that this trainer does not provide"


def _channel_problems(config: Any, spec: DataSpec, backbone: BackboneConfig) -> Iterator[str]:
    """Compare the network's input and output channels with the channels of the latents, after packing if configured."""
    channels = spec.image.channels * backbone.pack**2
    out_channels = config.get("out_channels") or config.in_channels
    output_fits = out_channels > channels if backbone.further_channels else out_channels == channels
    if config.in_channels == channels and output_fits:
        return
    problem = f"it maps {config.in_channels} to {out_channels} channels, but the latents have {spec.image.channels}"
    if backbone.pack > 1:
        problem += f" ({channels} in patches of {backbone.pack} × {backbone.pack})"
    if config.in_channels == channels and out_channels > channels:
        problem += " (to ignore the additional output channels, set backbone.further_channels)"
    yield problem


def _text_problems(network: Any, spec: DataSpec, backbone: BackboneConfig) -> Iterator[str]:
    """Compare the widths of hidden states and pooled outputs, and check that padding can be masked."""
    config, facts, texts = network.config, _class_facts(network), spec.texts
    expected = next((config[field] for field in facts["widths"] if config.get(field) is not None), None)
    width = backbone.states.width(texts)
    if not same(expected, width):
        yield f"it attends to states of width {expected}, but the text latents have width {width}"
    if "pooled" in facts:
        towers = [name for item in backbone.inputs.values() if isinstance(item, Pooled) for name in item.towers]
        pooled = sum(texts[name].pooled for name in towers)
        if pooled != config[facts["pooled"]]:
            expected = config[facts["pooled"]]
            yield f"it takes pooled outputs of width {expected}, but the text towers provide width {pooled}"
    hiding = [name for name in backbone.states.names if texts[name].hides_padding]
    if hiding and backbone.states.mask is None:
        yield (
            f"captions for {' and '.join(hiding)} were encoded with `masked` or `trim`, which hides padding, but "
            f"backbone.inputs gives the network no mask (name the mask argument, or encode the captions with `masked` "
            f"and `trim` set to false)"
        )
    if hiding and config.get("addition_embed_type") == "text":
        yield (
            f"with addition_embed_type text, it averages over all tokens, including padding, but captions for "
            f"{' and '.join(hiding)} were encoded with `masked` or `trim`, which hides padding (encode them with both "
            f"set to false)"
        )


def _side_problems(config: Any, shapes: Mapping[str, tuple[int, int]], backbone: BackboneConfig) -> Iterator[str]:
    """Check that the network's downsampling and patches divide the sides of the latents."""
    halvings = len(config.block_out_channels) - 1 if _is_unet(config) else 0
    patch = backbone.pack * int(config.get("patch_size") or 1)
    for bucket, sides in shapes.items():
        if any(side % 2**halvings for side in sides):
            yield f"it downsamples both sides by {2**halvings}, but the latents of bucket {bucket} are {sides}"
        if any(side % patch for side in sides):
            yield f"its patches are {patch} × {patch}, but the latents of bucket {bucket} are {sides}"


def _call_problems(
    network: Any, spec: DataSpec, shapes: Collection[tuple[int, int]], backbone: BackboneConfig
) -> Iterator[str]:
    """Call the network on one sample of each latent shape, and describe the first error or wrong output shape."""
    for hw in sorted(shapes):
        try:
            with torch.no_grad():
                _, call = dry_call(network, backbone, spec, hw)
                shape = tuple(call().shape)
        except BUILD_ERRORS as error:
            yield f"diffusers cannot call it on latents of size {hw}: {type(error).__name__}: {error}"
            return
        expected = (1, spec.image.channels, *hw)
        if shape != expected:
            yield f"its output has shape {shape} for latents of shape {expected}"
            return
