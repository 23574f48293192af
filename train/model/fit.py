"""Whether a network fits the latents: held against their record field by field, and called once without weights."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from shards.base.errors import RequestError
from shards.format.towers import ImageTower, TextTower
from train.data.spec import DataSpec
from train.model.backbone import BackboneConfig
from train.model.inputs import Pooled, example
from train.model.unet import CLASSES, NOT_BUILT, class_name, class_of, same

FURTHER: dict[str, tuple[str | None, ...]] = {
    "class_embed_type": (None,),
    "num_class_embeds": (None,),
    "addition_embed_type": (None, "text", "text_time"),
    "encoder_hid_dim_type": (None, "text_proj"),
}
"""Fields by which a U-Net may ask for further inputs, and the values with which it asks for none that is not there."""


GIVEN = ("timestep", "return_dict")
"""Arguments that every network is given, beside the latents."""


class TowersRead(Protocol):
    """What an encoding record and a DataSpec both say: which numbers a network gets."""

    @property
    def image(self) -> ImageTower: ...
    @property
    def texts(self) -> dict[str, TextTower]: ...


def check_fit(unet: Any, spec: DataSpec, backbone: BackboneConfig | None = None) -> None:
    """Hold the network's inputs, channels, widths and patches against the latents; call it once, without numbers.

    Args:
        backbone: how it is called, with its towers named.

    Raises:
        RequestError: what differs, with both values.
    """
    backbone = backbone or BackboneConfig().resolved(spec.texts)
    wrong = [*_wrong_inputs(unet, backbone), *_wrong_sizes(unet, spec, backbone)]
    if not wrong:
        wrong = _wrong_call(unet, spec, backbone)
    if wrong:
        what = "U-Net" if _is_unet(unet.config) else class_name(unet.config)
        raise RequestError(
            f"The {what} does not fit the latents: {'; '.join(wrong)}. Give another `backbone.config`, or another root."
        )


def check_precision(unet: Any, precision: str) -> None:
    """Refuse a precision in which the network's arithmetic overflows.

    Raises:
        RequestError: its class lists the precision as unsafe.
    """
    why = (_row(unet).get("refused_precisions") or {}).get(precision)
    if why is not None:
        raise RequestError(
            f"precision {precision} does not work for a {class_name(unet.config)}: {why}. Set `precision` to bfloat16 "
            f"or float32."
        )


def _is_unet(config: Mapping[str, Any]) -> bool:
    return "block_out_channels" in config


def _wrong_inputs(unet: Any, backbone: BackboneConfig) -> list[str]:
    """Of the arguments: which it has not, or lacks."""
    config, arguments = unet.config, backbone.top_arguments
    known = list(inspect.signature(type(unet).forward).parameters)[1:]
    free = [name for name in known[1:] if name not in GIVEN]  # the first is the latents'
    wrong = [
        f"it has no argument {name}, which backbone.inputs names (it has {', '.join(free)})"
        if name not in known
        else f"its argument {name} is given already, and backbone.inputs names it"
        for name in arguments
        if name not in free
    ]
    for name, asked_by in (_row(unet).get("needs") or {}).items():
        asks = asked_by is None or any(config.get(field) == value for field, value in asked_by.items())
        if asks and name not in arguments:
            why = "" if asked_by is None else "".join(f"its {key} {value} " for key, value in asked_by.items())
            wrong.append(f"{why or 'it '}asks for inputs beside latents, timesteps and text latents: {name}")
    return wrong + [
        f"its {field} {config[field]} asks for inputs beside latents, timesteps and text latents"
        for field, can_do in FURTHER.items()
        if config.get(field) not in can_do
    ]


def _wrong_sizes(unet: Any, spec: DataSpec, backbone: BackboneConfig) -> list[str]:
    """Of channels, widths and sides: what is given, and what it takes."""
    config, row, wrong = unet.config, _row(unet), []
    channels = spec.image.channels * backbone.pack**2
    packed = f", {channels} in patches of {backbone.pack} × {backbone.pack}" if backbone.pack > 1 else ""
    out_channels = config.get("out_channels") or config.in_channels
    fits = out_channels > channels if backbone.further_channels else out_channels == channels
    if config.in_channels != channels or not fits:
        variance = " (backbone.further_channels says whether some are left aside)" if out_channels > channels else ""
        wrong.append(
            f"it maps {config.in_channels} to {out_channels} channels; latents have {spec.image.channels}{packed}"
            + variance * (config.in_channels == channels)
        )
    width = next((config[field] for field in row["widths"] if config.get(field) is not None), None)
    given = max(sum(spec.texts[name].width for name in names) for names in backbone.states.towers or [])
    if not same(width, given):
        wrong.append(f"it attends to states of width {width}; text latents have {given}")
    pooled = sum(
        spec.texts[name].pooled for item in backbone.inputs.values() if isinstance(item, Pooled) for name in item.towers
    )
    if "pooled" in row and pooled != config[row["pooled"]]:
        wrong.append(f"it takes pooled outputs of width {config[row['pooled']]}; the text towers' have {pooled}")
    hiding = [name for name in backbone.states.names if spec.texts[name].hides_padding]
    if hiding and backbone.states.mask is None:
        wrong.append(
            f"{' and '.join(hiding)} hides padding (masked or trim), and this network is given no mask: encode it with "
            f"both false"
        )
    halvings = 2 ** (len(config.block_out_channels) - 1) if _is_unet(config) else 1
    side = backbone.pack * int(config.get("patch_size") or 1)
    for stream in spec.streams:
        if any(length % halvings for length in stream.latent_hw):
            wrong.append(
                f"it halves {halvings.bit_length() - 1} times; latents of {stream.config.bucket} are {stream.latent_hw}"
            )
        if any(length % side for length in stream.latent_hw):
            wrong.append(f"its patches are {side} × {side}; latents of {stream.config.bucket} are {stream.latent_hw}")
    return wrong


def _wrong_call(unet: Any, spec: DataSpec, backbone: BackboneConfig) -> list[str]:
    """What it says when it is called with one sample of each latent shape."""
    for hw in sorted({stream.latent_hw for stream in spec.streams}):
        try:
            with torch.no_grad():
                _, call = on_meta(unet, backbone, spec, hw)
                shape = tuple(call().shape)
        except NOT_BUILT as error:
            return [f"diffusers cannot call it on latents of {hw}: {type(error).__name__}: {error}"]
        if shape != (1, spec.image.channels, *hw):
            return [f"it makes {shape} of latents of {(1, spec.image.channels, *hw)}"]
    return []


def on_meta(
    unet: Any, backbone: BackboneConfig, data: TowersRead, latent_hw: tuple[int, int]
) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """A network like `unet`, of which only the config is looked at, and a call of it for one sample; no numbers."""
    target = (latent_hw[0] * data.image.downsampling, latent_hw[1] * data.image.downsampling)
    with torch.device("meta"):
        copy: nn.Module = class_of(unet.config, "the config").from_config(unet.config)
        latents = torch.empty(1, data.image.channels, *latent_hw)
        conditioning = example(data.texts, target)
        timesteps = torch.empty(1)

    def call() -> torch.Tensor:
        with torch.device("meta"):
            return backbone.predict(copy, latents, timesteps, conditioning)

    return copy, call


def _row(unet: Any) -> dict[str, Any]:
    return CLASSES[class_name(unet.config)]
