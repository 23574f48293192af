"""The memory that training configs need on each GPU, and the largest microbatches that fit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from plan.arithmetic.work import build_towers
from plan.config import Plan
from plan.report import stored_texts
from plan.text import rounded
from shards.base.config import load_config
from shards.base.errors import RequestError
from shards.base.table import counted, format_table
from shards.format.buckets import Bucket
from train.config import TrainConfig
from train.data.spec import DataSpec
from train.memory import largest_shape, step_settings
from train.model.backbone import BackboneConfig
from train.model.config import Checkpointing
from train.model.fit import check_fit
from train.model.memory import GIB, StepSettings, is_sharded, largest_microbatch, step_memory
from train.model.network import build_network
from train.model.optimizer import freeze_except
from train.run.preflight import World

CAPACITIES = {24: 23.5, 40: 39.4, 80: 79.1, 141: 139.8}
"""GB in a GPU's name → GiB that its driver reports, for an RTX 4090, A100, H100 and H200."""


def memory_report(plan: Plan, paths: list[Path]) -> str:
    """Tabulate each training config's memory, given the plan's encoders (at full text width) and number of GPUs.

    Raises:
        RequestError: a config is missing or invalid, or its network does not fit the plan's encoders.
    """
    num_gpus = plan.gpus or plan.gpu.gpus_per_node
    data = encoder_spec(plan)
    header = ["training config", "microbatch", "", "state", "averages", "batch", "activations", "total", "TFLOP/image"]
    rows = [[*header, *(f"in {size} GB" for size in CAPACITIES)]]
    for path in paths:
        config = load_config(TrainConfig, path, [], "plan")
        world = World(num_gpus, min(num_gpus, plan.gpu.gpus_per_node))
        world.check(None, config.global_batch_size, config.active_group)
        network, backbone, shape = read_network(config, data)
        for settings in variants(step_settings(config, num_gpus)):
            size = settings.microbatch_size
            estimates = {
                each: step_memory(network, backbone, data, shape, replace(settings, microbatch_size=each))
                for each in sorted({1, size, 2 * size})
            }
            memory = estimates[size]
            state = memory.weights + memory.gradients + memory.optimizer
            parts = (state, memory.averages, memory.batch, memory.activations, memory.total)
            fits = (largest_microbatch(estimates, int(capacity * GIB)) for capacity in CAPACITIES.values())
            rows.append(
                [str(path), str(size), describe(settings)]
                + [rounded(part / GIB, 1) for part in parts]
                + [rounded(memory.flops / 1e12, 3)]
                + ["-" if fit == 0 else "all" if fit >= settings.images else str(fit) for fit in fits]
            )
    return (
        f"Memory of each GPU in GiB, on {counted(num_gpus, 'GPU')}, and the largest microbatch that fits\n\n"
        f"{format_table(rows, '<><' + '>' * (len(rows[0]) - 3))}\n\n"
        f"state: weights, gradients and optimizer   averages: moving averages of the weights, from the step at which "
        f"they start\nTFLOP/image: operations of the forward and the backward pass, including recomputation\n"
        f"all: the GPU's whole share of a global batch fits   -: not even one image fits"
    )


def encoder_spec(plan: Plan) -> DataSpec:
    """Describe latents from the plan's encoders, with text at full width."""
    _, image, encoders = build_towers(plan.networks)
    texts = {name: tower for name, (_, tower) in encoders.items()}
    stored = stored_texts(plan, texts).items()
    texts = {name: tower.model_copy(update={"width": texts[name].width}) for name, tower in stored}
    return DataSpec(image, texts, {}, {}, (), 1)


def read_network(config: TrainConfig, data: DataSpec) -> tuple[Any, BackboneConfig, tuple[int, int]]:
    """Build the network of a training config without weights, and return it with its inputs and its largest latents.

    Raises:
        RequestError: the network or its buckets do not fit the plan's encoders.
    """
    network = build_network(config.network, None)
    try:
        backbone = config.backbone.resolved(data.texts)
        check_fit(network, data, backbone)
        shapes = {Bucket.parse(stream.bucket).latent_hw(data.image.downsampling) for stream in config.data.streams}
    except (RequestError, ValueError) as error:
        raise RequestError(
            f"{config.network} does not fit the encoders of the plan. Pass the plan of the same model family with "
            f"`--config`. {error}"
        ) from None
    freeze_except(network, config.train_only)
    return network, backbone, largest_shape(shapes)


def variants(settings: StepSettings) -> list[StepSettings]:
    """Return the settings as configured, then with half of the activations recomputed and with those of all blocks, as
    long as that recomputes more than configured.

    The last is estimated without compilation, which is faster and gives a slightly higher estimate.
    """
    half = replace(settings, gradient_checkpointing=0.5)
    blocks = replace(settings, gradient_checkpointing=True, compile=False)
    return [
        settings,
        *(each for each in (half, blocks) if each.gradient_checkpointing > settings.gradient_checkpointing),
    ]


def describe(settings: StepSettings) -> str:
    """Describe what affects the memory."""
    compiled = ["compiled"] if settings.compile else []
    sharded = [f"sharding {settings.sharding} over {settings.num_processes}"] if is_sharded(settings) else []
    return ", ".join([*compiled, *sharded, *checkpointing(settings.gradient_checkpointing)])


def checkpointing(setting: Checkpointing) -> list[str]:
    """Describe gradient checkpointing; an empty list means none."""
    if not setting:
        return []
    return ["checkpointing" if setting is True else f"checkpointing {100 * setting:g}%"]
