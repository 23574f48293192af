"""Building the network to train, a U-Net or a different diffusers class, and loading pretrained weights into it."""

import difflib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
import torch._functorch.config
import yaml
from safetensors import SafetensorError
from torch import Tensor, nn

from shards.base.durable import read_json
from shards.base.errors import RequestError
from shards.format.models import model_folder
from train.model.blocks import find_blocks
from train.model.tensors import load_tensors

PRETRAINED_FILES = (
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.safetensors.index.json",
    "diffusion_pytorch_model.fp16.safetensors",
)
"""Weight files to look for, in order of preference. Half-precision weights come last, because they are rounded."""
SHARDED_FILES = "diffusion_pytorch_model-*-of-*.safetensors"
"""Pattern for the sharded weight files that an index lists."""
CLASSES: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("backbones.yaml").read_text())
"""Facts about each supported class that its code does not state, by class name. The file explains them."""
UNET = "UNet2DConditionModel"
NOT_ARCHITECTURE = {UNET: ("sample_size",)}
"""Config fields that do not affect the output, by class name. A U-Net's sample_size does not, but a transformer's
positions depend on its sample_size."""
BUILD_ERRORS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Exceptions that diffusers' classes raise for inconsistent sizes."""


def build_network(path: Path, seed: int | None, text_widths: tuple[int, int] | None = None) -> Any:
    """Build a network from a diffusers config.json, with random weights that depend only on `seed`.

    Args:
        seed: seed of the weights; None: the network is built without weights, on the meta device.
        text_widths: (full width, as in the config; projected width, to build with); None: text is not projected.

    Raises:
        RequestError: the file cannot be read, the network's class is not supported, diffusers cannot build the network,
            the config enables dropout, or its text width is not the full width.
    """
    fields = read_json(path)
    model_class = class_of(fields, path)
    check_fields(fields, model_class, path)
    if text_widths is not None:
        fields = with_text_width(fields, *text_widths, path)
    with torch.random.fork_rng(devices=[]), torch.device("cpu" if seed is not None else "meta"):
        torch.manual_seed(seed or 0)
        try:
            network = model_class.from_config(fields)
        except BUILD_ERRORS as error:
            raise RequestError(
                f"diffusers cannot build {model_class.__name__} from {path}: {type(error).__name__}: {error}. "
                f"Correct the sizes in that file."
            ) from error
    if network.config.get("dropout"):
        raise RequestError(
            f"{path} sets dropout {network.config.dropout}. Dropout masks would depend on the number of ranks, so "
            f"dropout is not supported. Set dropout to 0."
        )
    for name, value in CLASSES[model_class.__name__].get("initial", {}).items():
        nn.init.constant_(network.get_parameter(name), value)
    return network


def compiles_by_block(network: Any, is_sharded: bool) -> bool:
    """Return whether each block of this network is compiled separately rather than the network as a whole."""
    return is_sharded or class_name(network.config) != UNET


def compile_network(
    network: Any,
    num_shapes: int,
    *,
    by_block: bool = False,
    recomputed: float = 0.0,
    backend: str | Callable[..., Any] | None = None,
) -> None:
    """Compile a network in place, with static graphs for each of `num_shapes` latent shapes.

    By default, torch would compile a single, slower dynamic graph for the second and all later shapes, and would stop
    compiling after eight graphs.

    Args:
        by_block: whether to compile each block separately. Blocks of the same class share graphs, so this takes seconds
            instead of minutes, and it also works for a network that gathers its weights block by block.
        recomputed: share of each graph's activations that the backward pass recomputes; torch chooses those that take
            the fewest operations. Like torch's other settings, it applies to everything that this process compiles from
            then on.
        backend: torch.compile's backend; None: the default, which generates kernels.
    """
    modules = list(find_blocks(network).values()) if by_block else [network]
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, len(modules) * (num_shapes + 1))  # one more for validation
    dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, dynamo.recompile_limit)
    torch._functorch.config.activation_memory_budget = 1 - recomputed
    dynamo.skip_nnmodule_hook_guards = False  # otherwise, a block with a hook inside would use another block's graph
    for module in modules:
        module.compile(dynamic=False, **({} if backend is None else {"backend": backend}))


def class_name(fields: Mapping[str, Any]) -> str:
    """Return the class name in a diffusers config; a config without a class name is a U-Net's."""
    return str(fields.get("_class_name", UNET))


def class_of(fields: Mapping[str, Any], path: Path | str) -> Any:
    """Return the diffusers class that a config names, or the U-Net class if it names none.

    Args:
        path: source of the config, for the error message.

    Raises:
        RequestError: backbones.yaml does not list the class.
    """
    name = class_name(fields)
    if name not in CLASSES or not hasattr(diffusers, name):
        near = difflib.get_close_matches(name, CLASSES, n=1)
        raise RequestError(
            f"The network class in {path} is {name}{f' (did you mean {near[0]}?)' if near else ''}, which this trainer "
            f"does not support. Use one of {', '.join(CLASSES)}."
        )
    return getattr(diffusers, name)


def check_fields(fields: Mapping[str, Any], model_class: Any, path: Path) -> None:
    """Reject unknown fields, which diffusers would ignore with a warning.

    Raises:
        RequestError: the class has no argument with the name of a field.
    """
    known = list(inspect.signature(model_class.__init__).parameters)[1:]
    for name in fields:
        if name not in known and not name.startswith("_"):
            near = difflib.get_close_matches(name, known, n=1)
            raise RequestError(
                f"{path} has the field {name}{f' (did you mean {near[0]}?)' if near else ''}, which diffusers' "
                f"{model_class.__name__} does not recognize. diffusers would ignore the field and build a different "
                f"network than intended. Correct or remove the field."
            )


def width_field(fields: Mapping[str, Any]) -> str:
    """Return the name of the field in a network's config that holds its text width."""
    names: list[str] = CLASSES[class_name(fields)]["widths"]
    return next((name for name in names if fields.get(name) is not None), names[-1])


def with_text_width(fields: Mapping[str, Any], replaced: int, width: int, where: object) -> dict[str, Any]:
    """Return a network's config with the text width `width` instead of `replaced`.

    Args:
        where: source of the config, for the error message.

    Raises:
        RequestError: the config has a different text width than `replaced`.
    """
    name = width_field(fields)
    default = inspect.signature(class_of(fields, str(where)).__init__).parameters[name].default
    found = fields.get(name, default)
    if not same(found, replaced):
        raise RequestError(
            f"{where} has {name} {found}, but must have the width of the text encoder's states, {replaced}. "
            f"Set {name} to {replaced}; the trainer builds the network with the projected width, {width}, and the "
            f"export restores {replaced}."
        )
    return {**fields, name: width}


def load_pretrained(network: Any, name: str) -> None:
    """Load the weights of a pretrained diffusers network into `network` as float32.

    Args:
        name: folder or Hugging Face Hub repository of the pretrained network.

    Raises:
        RequestError: the folder has no safetensors weights, or the weights belong to a different architecture; the
            message names the fields that differ.
    """
    folder = model_folder(name, ("config.json", *PRETRAINED_FILES, SHARDED_FILES))
    with torch.device("meta"):
        try:
            fields = read_json(folder / "config.json")
            theirs = class_of(fields, folder).from_config(fields).config
        except RequestError as error:
            raise RequestError(f"init_unet: {error}") from error
        except BUILD_ERRORS as error:
            raise RequestError(
                f"init_unet: diffusers cannot build a network from {folder}/config.json: {error}. Set init_unet to a "
                f"folder with a diffusers network."
            ) from error
    path = next((folder / file for file in PRETRAINED_FILES if (folder / file).is_file()), None)
    if path is None:
        raise RequestError(
            f"init_unet: {folder} has no {' or '.join(PRETRAINED_FILES)}. Other formats are not supported, so convert "
            f"the weights to safetensors."
        )
    if path.name == PRETRAINED_FILES[-1]:
        print(f"init_unet: {folder} has only half-precision weights; training starts from {path.name}.", flush=True)
    try:
        load_matching(network, path, theirs)
    except RequestError as error:
        raise RequestError(f"init_unet: {error}") from error


def load_matching(
    network: Any,
    path: Path,
    theirs: Mapping[str, Any],
    convert: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict,
) -> None:
    """Load the weights at `path` into `network` as float32.

    Args:
        path: a safetensors file, or the index of sharded safetensors files.
        theirs: diffusers config of the network to which the weights belong, after conversion.
        convert: applied to the weights, which have the file's data type, before loading.

    Raises:
        RequestError: a file is missing or damaged, or the weights belong to a different architecture; the message names
            the fields that differ.
    """
    if different := architecture_differences(theirs, network):
        raise RequestError(
            f"{path.parent} has a different architecture from `backbone.config`: {different} (pretrained ≠ config). "
            f"Set `backbone.config` to a config that matches {path.parent}/config.json."
        )
    try:
        network.load_state_dict(convert(load_tensors(path)))  # converts to float32 while copying
    except (SafetensorError, FileNotFoundError) as error:
        raise RequestError(f"{path} is damaged: {error}. Download it again.") from error
    except RuntimeError as error:
        raise RequestError(f"The weights in {path} do not fit the network: {error}") from error


def architecture_differences(theirs: Mapping[str, Any], network: Any) -> str:
    """List the fields in which a diffusers config differs from the config of `network`, as `field: theirs ≠ its; …`.

    Comparing weight shapes is not enough: many fields, such as the number of heads, affect a network's output but not
    the shapes. A field that is missing in `theirs` was added by a later version of diffusers and has its default value
    in `network`.
    """
    if class_name(theirs) != class_name(network.config):
        return f"class: {class_name(theirs)} ≠ {class_name(network.config)}"
    ignored = NOT_ARCHITECTURE.get(class_name(network.config), ())
    return "; ".join(
        f"{field}: {theirs[field]} ≠ {value}"
        for field, value in network.config.items()
        if field in theirs and not field.startswith("_") and field not in ignored and not same(theirs[field], value)
    )


def same(a: Any, b: Any) -> bool:
    """Return whether two config values are equal. A number equals a list that repeats this number for every block."""
    a, b = (list(value) if isinstance(value, list | tuple) else value for value in (a, b))
    if isinstance(a, list) != isinstance(b, list):
        values, value = (a, b) if isinstance(a, list) else (b, a)
        return all(item == value for item in values)
    return bool(a == b)
