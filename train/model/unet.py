"""The U-Net, from a diffusers config file or an earlier run, and the check that it fits the latents."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from safetensors import SafetensorError
from safetensors.torch import load_file

from shards.base.errors import RequestError
from shards.format.models import model_folder, read_model_config
from train.data.spec import DataSpec

PRETRAINED_FILES = ("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.fp16.safetensors")
INPUTS: dict[str, tuple[str | None, ...]] = {
    "class_embed_type": (None,),
    "num_class_embeds": (None,),
    "addition_embed_type": (None, "text"),
    "encoder_hid_dim_type": (None, "text_proj"),
}
"""Fields by which a U-Net may ask for further inputs, and the values with which it does not."""
NOT_ARCHITECTURE = ("sample_size",)


def build_unet(path: Path, seed: int) -> UNet2DConditionModel:
    """A U-Net with random weights that depend on `seed` alone, from a diffusers config.json.

    Raises:
        RequestError: no such file, or diffusers cannot build it.
    """
    fields = read_unet_config(path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            unet = UNet2DConditionModel.from_config(fields)
        except (TypeError, ValueError) as error:
            raise RequestError(f"diffusers cannot build a U-Net from {path}: {error}") from error
    if unet.config.get("dropout"):
        raise RequestError(f"{path} sets dropout {unet.config.dropout}; its masks would depend on the number of ranks.")
    return unet


def read_unet_config(path: Path) -> dict[str, object]:
    """The JSON at `path`.

    Raises:
        RequestError: it is not there, or not JSON.
    """
    try:
        fields = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RequestError(f"The U-Net config {path} cannot be read: {error}. Give a diffusers config.json.") from error
    if not isinstance(fields, dict):
        raise RequestError(f"The U-Net config {path} holds no JSON object. Give a diffusers config.json.")
    return fields


def check_fit(unet: UNet2DConditionModel, spec: DataSpec) -> None:
    """Hold the U-Net's inputs, channels, widths and steps against the latents.

    Raises:
        RequestError: what differs, with both values.
    """
    config = unet.config
    wrong = [
        f"its {field} {config[field]} asks for inputs beside latents, timesteps and text latents"
        for field, can_do in INPUTS.items()
        if config.get(field) not in can_do
    ]
    channels, (_, text) = spec.image.channels, spec.text
    if (config.in_channels, config.out_channels) != (channels, channels):
        wrong.append(f"it maps {config.in_channels} to {config.out_channels} channels; latents have {channels}")
    width = config.encoder_hid_dim if config.encoder_hid_dim_type == "text_proj" else config.cross_attention_dim
    if not _same(width, text.width):
        wrong.append(f"it attends to states of width {width}; text latents have {text.width}")
    halvings = 2 ** (len(config.block_out_channels) - 1)
    for stream in spec.streams:
        if any(side % halvings for side in stream.latent_hw):
            wrong.append(
                f"it halves {halvings.bit_length() - 1} times; latents of {stream.config.bucket} are {stream.latent_hw}"
            )
    if wrong:
        raise RequestError(f"The U-Net does not fit the latents: {'; '.join(wrong)}. Give another `unet` or root.")


def load_pretrained(unet: UNet2DConditionModel, name: str) -> None:
    """Load the weights of a diffusers U-Net, a folder or on the hub, into `unet`, as float32.

    Raises:
        RequestError: it is not there, has no safetensors weights, or is another architecture; with the fields named.
    """
    folder = model_folder(name, ("config.json", *PRETRAINED_FILES))
    with torch.device("meta"):
        try:
            theirs = UNet2DConditionModel.from_config(read_model_config(folder)).config
        except (TypeError, ValueError) as error:
            raise RequestError(f"init_unet: {folder}/config.json is not a U-Net's: {error}") from error
    path = next((folder / file for file in PRETRAINED_FILES if (folder / file).is_file()), None)
    if path is None:
        raise RequestError(f"init_unet: {folder} has no {' or '.join(PRETRAINED_FILES)}; other formats are not loaded.")
    try:
        load_matching(unet, path, theirs)
    except RequestError as error:
        raise RequestError(f"init_unet: {error}") from error


def load_matching(unet: UNet2DConditionModel, path: Path, theirs: Mapping[str, Any]) -> None:
    """Load the safetensors file at `path`, a U-Net's of the diffusers config `theirs`, into `unet`, as float32.

    Raises:
        RequestError: it is damaged, or another architecture's; with the fields named.
    """
    if different := architecture_differences(theirs, unet):
        raise RequestError(
            f"{path.parent} is another architecture than `unet`: {different} (there ≠ here). Set `unet` to a config "
            f"like {path.parent}/config.json."
        )
    try:
        unet.load_state_dict({key: value.float() for key, value in load_file(path).items()})
    except SafetensorError as error:
        raise RequestError(f"{path} is damaged: {error}. Fetch it again.") from error
    except RuntimeError as error:
        raise RequestError(f"the weights in {path} are not of this U-Net: {error}") from error


def architecture_differences(theirs: Mapping[str, Any], unet: UNet2DConditionModel) -> str:
    """Fields of a diffusers config that differ from `unet`'s, as `field: there ≠ here; …`; empty where none does.

    (Many, such as the number of heads, change what a U-Net computes and no weight's shape.) One that is not `there` is
    of a later diffusers, and at its default here.
    """
    return "; ".join(
        f"{field}: {theirs[field]} ≠ {value}"
        for field, value in unet.config.items()
        if field in theirs
        and not field.startswith("_")
        and field not in NOT_ARCHITECTURE
        and not _same(theirs[field], value)
    )


def _same(a: Any, b: Any) -> bool:
    """Equal, where diffusers takes one number for all blocks as well as a list: 8 is [8, 8, 8]."""
    a, b = (list(value) if isinstance(value, list | tuple) else value for value in (a, b))
    if isinstance(a, list) != isinstance(b, list):
        values, value = (a, b) if isinstance(a, list) else (b, a)
        return all(item == value for item in values)
    return bool(a == b)
