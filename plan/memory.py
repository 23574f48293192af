"""The memory that training configs need on each GPU, and the largest microbatches that fit."""

from dataclasses import replace
from pathlib import Path

from plan.arithmetic.work import build_towers
from plan.config import Plan
from shards.base.config import load_config
from shards.base.errors import RequestError
from shards.base.table import counted, format_table
from shards.format.buckets import Bucket
from train.config import TrainConfig
from train.data.spec import DataSpec
from train.memory import largest_shape, step_settings
from train.model.fit import check_fit
from train.model.memory import GIB, StepSettings, largest_microbatch, step_memory
from train.model.network import build_network

CAPACITIES = {24: 23.5, 40: 39.4, 80: 79.1, 141: 139.8}
"""GB in a GPU's name → GiB that its driver reports, for an RTX 4090, A100, H100 and H200."""


def memory_report(plan: Plan, paths: list[Path]) -> str:
    """Tabulate the memory of each training config on the plan's networks and number of GPUs.

    Raises:
        RequestError: a config is missing or invalid, or its network does not fit the plan's encoders.
    """
    num_gpus = plan.gpus or plan.gpu.gpus_per_node
    _, image, encoders = build_towers(plan.networks)
    data = DataSpec(image, {name: tower for name, (_, tower) in encoders.items()}, {}, {}, (), 1)
    header = ["training config", "microbatch", "", "state", "averages", "batch", "activations", "total"]
    rows = [[*header, *(f"in {size} GB" for size in CAPACITIES)]]
    for path in paths:
        config = load_config(TrainConfig, path, [], "plan")
        if config.global_batch_size % num_gpus:
            raise RequestError(
                f"{path}: global_batch_size {config.global_batch_size} cannot be split evenly across "
                f"{counted(num_gpus, 'GPU')}. Choose a different number with `--gpus`."
            )
        network, backbone = build_network(config.network, None), config.backbone.resolved(data.texts)
        check_fit(network, data, backbone)
        shape = largest_shape(
            {Bucket.parse(stream.bucket).latent_hw(image.downsampling) for stream in config.data.streams}
        )
        for settings in variants(step_settings(config, num_gpus)):
            first, second = (
                (size, step_memory(network, backbone, data, shape, replace(settings, microbatch_size=size)))
                for size in (settings.microbatch_size, 2 * settings.microbatch_size)
            )
            memory = first[1]
            state = memory.weights + memory.gradients + memory.optimizer
            parts = (state, memory.averages, memory.batch, memory.activations, memory.total)
            fits = (largest_microbatch(first, second, int(size * GIB)) for size in CAPACITIES.values())
            rows.append(
                [str(path), str(settings.microbatch_size), describe(settings)]
                + [f"{part / GIB:.1f}" for part in parts]
                + ["-" if size == 0 else "all" if size >= settings.images else str(size) for size in fits]
            )
    return (
        f"Memory of each GPU in GiB, on {counted(num_gpus, 'GPU')}, and the largest microbatch that fits\n\n"
        f"{format_table(rows, '<><' + '>' * (len(rows[0]) - 3))}\n\n"
        f"state: weights, gradients and optimizer   averages: moving averages of the weights, from the step at which "
        f"they start\nall: a GPU's share of a global batch   -: none"
    )


def variants(settings: StepSettings) -> list[StepSettings]:
    """Return the settings as configured and, unless they already checkpoint, with gradient checkpointing.

    The latter are estimated without compilation, which is faster and hardly changes the few activations that remain.
    """
    if settings.gradient_checkpointing:
        return [settings]
    return [settings, replace(settings, gradient_checkpointing=True, compile=False)]


def describe(settings: StepSettings) -> str:
    """Describe what affects the memory."""
    compiled = ["compiled"] if settings.compile else []
    sharded = [f"sharding {settings.sharding}"] if settings.sharding != "none" else []
    return ", ".join([*compiled, *sharded, *(["checkpointing"] if settings.gradient_checkpointing else [])])
