"""`compile` compiles every block of each family, with and without sharding, and does not change the losses."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.families.small import FAMILIES, Small, in_make_test, stir
from tests.families.starting import small_run, started
from tests.graphs import Graphs
from train.config import TrainConfig
from train.data.batch import Batch
from train.data.draws import Draws
from train.data.loader import Loader
from train.model.blocks import find_blocks
from train.model.network import compile_network
from train.model.recompute import recompute_blocks, recomputed_shares
from train.model.sharding import shard_weights
from train.objective.loss import DiffusionLoss
from train.prepare import prepare

CHECKPOINTING = "gradient_checkpointing"
UNETS = ("sd2", "sd15", "sdxl")
NUM_MICROBATCHES = 2


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        # SDXL's network has all classes of Stable Diffusion 1.5's and 2's
        *(pytest.param(name, {}, marks=[pytest.mark.slow] if name in ("sd2", "sd15") else []) for name in FAMILIES),
        ("prx", {CHECKPOINTING: True}),
    ],
)
def test_every_block_is_compiled_once_per_latent_shape(
    name: str, changed: dict[str, bool], small: Callable[[str], Small], graphs: Graphs
) -> None:
    """Train two steps on each of two latent shapes, with the shipped gradient checkpointing and with that of all
    blocks."""
    made = small(name)
    checkpointed = (made.family.read("phase1.yaml") | changed).get(CHECKPOINTING, False)
    of_blocks, of_activations = recomputed_shares(checkpointed, compiled=True)
    losses = {}
    for compiled in (False, True):
        changes = {"global_batch_size": 4, "microbatch_size": 2, "max_steps": 4, "compile": compiled}
        changes |= {CHECKPOINTING: checkpointed}
        config = TrainConfig.model_validate(small_run(made, f"compiled-{compiled}", **changes))
        step = started(config).train_step
        assert torch._functorch.config.activation_memory_budget == 1 - (of_activations if compiled else 0)
        whole, cut = shapes(config)
        losses[compiled] = [step(batch, number).sums.total for number, batch in enumerate([whole, cut])]
        num_graphs, calls = len(graphs.captured), graphs.calls
        losses[compiled] += [step(batch, 2 + number).sums.total for number, batch in enumerate([whole, cut])]
    blocks = 1 if name in UNETS else len(find_blocks(step.network))
    assert losses[True] == pytest.approx(losses[False], rel=1e-5)
    assert calls == 2 * NUM_MICROBATCHES * blocks * (1 + of_blocks) and graphs.calls == 2 * calls
    assert len(graphs.captured) == num_graphs
    assert not graphs.breaks


# tests/train/model/test_recompute.py tests the network classes of the other families
@pytest.mark.parametrize("name", in_make_test("pixart-sigma", "sd3", "sana", "prx"))
def test_half_of_the_blocks_can_be_recomputed(name: str, small: Callable[[str], Small]) -> None:
    config = TrainConfig.model_validate(small_run(small(name), "recomputed", global_batch_size=4))
    prepared = prepare(config)
    network = prepared.network
    stir(network)
    loss = DiffusionLoss(config.objective, prepared.spec, torch.device("cpu"), prepared.backbone)
    batch, _ = shapes(config)

    def gradients() -> list[torch.Tensor]:
        network.zero_grad()
        loss(network, loss.add_noise(batch, Draws(0, 0, batch.slots))).total.sum().backward()
        return [weight.grad.clone() for weight in network.parameters() if weight.grad is not None]

    expected = gradients()
    recompute_blocks(network, 0.5)
    blocks = [block for block in network.modules() if hasattr(block, "is_recomputed")]
    called: list[nn.Module] = []
    for block in blocks:
        block.register_forward_pre_hook(lambda block, _: called.append(block))
    for found, wanted in zip(gradients(), expected, strict=True):
        assert torch.equal(found, wanted)
    # diffusers never recomputes the first block in a U-Net's middle
    middle = [network.mid_block.resnets[0]] if name in UNETS else []
    for number, block in enumerate(blocks):
        assert called.count(block) == (2 if number % 2 == 0 and block not in middle else 1)


def shapes(config: TrainConfig) -> tuple[Batch, Batch]:
    """Return a batch of the run, and one with only the left half of its latents."""
    size = config.global_batch_size
    whole = next(iter(Loader(config.data, prepare(config).spec, size, 0, 0, torch.arange(size))))
    halved = {
        name: values[..., : values.shape[-1] // 2] if name.startswith("image_latents") else values
        for name, values in whole.columns.items()
    }
    return whole, replace(whole, columns=halved)


@pytest.fixture
def _one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_one_process")
@pytest.mark.parametrize("name", ["sdxl", pytest.param("sd3", marks=pytest.mark.slow), "flux1"])
def test_every_block_of_a_sharded_network_is_compiled(name: str, small: Callable[[str], Small], graphs: Graphs) -> None:
    """These families shard their weights as shipped."""
    config = TrainConfig.model_validate(small_run(small(name), "sharded", global_batch_size=4))
    prepared = prepare(config)
    stir(prepared.network)
    loss = DiffusionLoss(config.objective, prepared.spec, torch.device("cpu"), prepared.backbone)
    sharded = copy.deepcopy(prepared.network)
    shard_weights(sharded, "full", "float32")
    compile_network(sharded, 1, by_block=True, recomputed=0.5)
    found: list[float] = []
    expected: list[float] = []
    batch, _ = shapes(config)
    for number in range(2):
        for network, losses in ((prepared.network, expected), (sharded, found)):
            noisy = loss.add_noise(batch, Draws(0, number, batch.slots))
            total = loss(network, noisy).total.sum()
            total.backward()
            losses.append(float(total.detach()))
        if number == 0:
            num_graphs = len(graphs.captured)
    assert found == pytest.approx(expected, rel=1e-5)
    assert graphs.calls == 2 * len(find_blocks(prepared.network))
    assert len(graphs.captured) == num_graphs
    assert not graphs.breaks
