"""The network to train, of a diffusers class, from a config file or an earlier run."""

import difflib
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
import yaml
from safetensors import SafetensorError

from shards.base.errors import RequestError
from shards.format.models import model_folder, read_model_config
from train.model.tensors import load_tensors

PRETRAINED_FILES = (
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.safetensors.index.json",
    "diffusion_pytorch_model.fp16.safetensors",
)
"""Weights to look for, best first: half-precision weights are rounded, so they come last."""
PARTS = "diffusion_pytorch_model-*-of-*.safetensors"
"""Weights files that an index lists."""
CLASSES: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("backbones.yaml").read_text())
"""Class → what must be known of it before it is called."""
UNET = "UNet2DConditionModel"
NOT_ARCHITECTURE = {UNET: ("sample_size",)}
"""Class → config fields that do not change what it computes. A transformer's positions depend on its sample_size."""
NOT_BUILT = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What diffusers' classes raise of numbers that do not fit each other."""


def build_unet(path: Path, seed: int | None) -> Any:
    """A network with random weights that depend on `seed` alone, from a diffusers config.json.

    Args:
        seed: None for a network without weights, on the meta device.

    Raises:
        RequestError: no such file, diffusers cannot build it, or it is of a class that is not tested.
    """
    fields = read_unet_config(path)
    model_class = class_of(fields, path)
    check_fields(fields, model_class, path)
    with torch.random.fork_rng(devices=[]), torch.device("cpu" if seed is not None else "meta"):
        torch.manual_seed(seed or 0)
        try:
            unet = model_class.from_config(fields)
        except NOT_BUILT as error:
            why = f"{type(error).__name__}: {error}"
            raise RequestError(f"diffusers cannot build a {model_class.__name__} from {path}: {why}") from error
    if unet.config.get("dropout"):
        raise RequestError(f"{path} sets dropout {unet.config.dropout}; its masks would depend on the number of ranks.")
    return unet


def compile_network(unet: Any, num_shapes: int) -> None:
    """Compile a network in place, into one graph of fixed sizes for each of `num_shapes` shapes of latents.

    torch makes the second shape's graph one of any size, which is slower, and after the eighth it compiles no more.
    """
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, num_shapes + 1)  # and the shape of validation
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, limits.recompile_limit)
    unet.compile(dynamic=False)


def class_name(fields: Mapping[str, Any]) -> str:
    """The name of the class that a diffusers config is of; of U-Nets it may be left out."""
    return str(fields.get("_class_name", UNET))


def class_of(fields: Mapping[str, Any], path: Path | str) -> Any:
    """The diffusers class that a config names; a U-Net's where it names none.

    Raises:
        RequestError: it is none of those that are tested.
    """
    name = class_name(fields)
    if name not in CLASSES or not hasattr(diffusers, name):
        near = difflib.get_close_matches(name, CLASSES, n=1)
        raise RequestError(
            f"{path} is of a {name}{f' (did you mean {near[0]}?)' if near else ''}, which this trainer does not call. "
            f"It trains {', '.join(CLASSES)}."
        )
    return getattr(diffusers, name)


def check_fields(fields: Mapping[str, Any], model_class: Any, path: Path) -> None:
    """Refuse what diffusers would leave out with a warning.

    Raises:
        RequestError: the class takes no argument of that name.
    """
    known = list(inspect.signature(model_class.__init__).parameters)[1:]
    for name in fields:
        if name not in known and not name.startswith("_"):
            near = difflib.get_close_matches(name, known, n=1)
            raise RequestError(
                f"{path} has the field {name}{f' (did you mean {near[0]}?)' if near else ''}, which diffusers' "
                f"{model_class.__name__} does not take: it would be left out, and another network trained. Take it out."
            )


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


def load_pretrained(unet: Any, name: str) -> None:
    """Load the weights of a diffusers U-Net, a folder or on the hub, into `unet`, as float32.

    Raises:
        RequestError: it is not there, has no safetensors weights, or is another architecture; with the fields named.
    """
    folder = model_folder(name, ("config.json", *PRETRAINED_FILES, PARTS))
    with torch.device("meta"):
        try:
            fields = read_model_config(folder)
            theirs = class_of(fields, folder).from_config(fields).config
        except NOT_BUILT as error:
            raise RequestError(f"init_unet: {folder}/config.json is not a U-Net's: {error}") from error
    path = next((folder / file for file in PRETRAINED_FILES if (folder / file).is_file()), None)
    if path is None:
        raise RequestError(f"init_unet: {folder} has no {' or '.join(PRETRAINED_FILES)}; other formats are not loaded.")
    if path.name == PRETRAINED_FILES[-1]:
        print(f"init_unet: {folder} has half-precision weights only; training starts from {path.name}.", flush=True)
    try:
        load_matching(unet, path, theirs)
    except RequestError as error:
        raise RequestError(f"init_unet: {error}") from error


def load_matching(unet: Any, path: Path, theirs: Mapping[str, Any]) -> None:
    """Load the safetensors file at `path`, or those that it names, into `unet`, as float32.

    Args:
        theirs: the diffusers config of the network that they are of.

    Raises:
        RequestError: it is damaged, or another architecture's; with the fields named.
    """
    if different := architecture_differences(theirs, unet):
        raise RequestError(
            f"{path.parent} has a different architecture than `backbone.config`: {different} (there ≠ here). Set it to "
            f"a config like {path.parent}/config.json."
        )
    try:
        unet.load_state_dict({key: value.float() for key, value in load_tensors(path).items()})
    except (SafetensorError, FileNotFoundError) as error:
        raise RequestError(f"{path} is damaged: {error}. Fetch it again.") from error
    except RuntimeError as error:
        raise RequestError(f"the weights in {path} are not of this U-Net: {error}") from error


def architecture_differences(theirs: Mapping[str, Any], unet: Any) -> str:
    """Fields of a diffusers config that differ from `unet`'s, as `field: there ≠ here; …`; empty where none does.

    (Many, such as the number of heads, change what a U-Net computes and no weight's shape.) One that is not `there` is
    of a later diffusers, and at its default here.
    """
    ignored = NOT_ARCHITECTURE.get(class_name(unet.config), ())
    return "; ".join(
        f"{field}: {theirs[field]} ≠ {value}"
        for field, value in unet.config.items()
        if field in theirs and not field.startswith("_") and field not in ignored and not same(theirs[field], value)
    )


def same(a: Any, b: Any) -> bool:
    """Equal, where diffusers takes one number for all blocks as well as a list: 8 is [8, 8, 8]."""
    a, b = (list(value) if isinstance(value, list | tuple) else value for value in (a, b))
    if isinstance(a, list) != isinstance(b, list):
        values, value = (a, b) if isinstance(a, list) else (b, a)
        return all(item == value for item in values)
    return bool(a == b)
