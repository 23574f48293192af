"""With `compile`, every block of a family runs in a compiled graph, sharded or not, and the losses do not change."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partialmethod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters

from tests.families.small import FAMILIES, Small, stir
from tests.families.starting import small_run, started
from train.config import TrainConfig
from train.data.batch import Batch
from train.data.draws import Draws, philox
from train.data.loader import Loader
from train.model.blocks import find_blocks
from train.model.network import compile_network
from train.model.sharding import shard_weights
from train.objective.loss import DiffusionLoss
from train.prepare import prepare

UNETS = ("sd2", "sd15", "sdxl")
NUM_MICROBATCHES = 2


@dataclass
class Graphs:
    """Counts the graphs that are captured, and their calls. They are executed eagerly."""

    calls: int = 0
    made: list[torch.fx.GraphModule] = field(default_factory=list)

    def capture(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        self.made.append(graph)

        def run(*arguments: Any) -> Any:
            self.calls += 1
            return graph.forward(*arguments)

        return run


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Graphs]:
    """The graphs that are compiled during the test."""
    found = Graphs()
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend=found.capture))
    monkeypatch.setattr("train.data.draws.fused_philox", lambda: philox)
    counters.clear()
    yield found
    torch.compiler.reset()


@pytest.mark.parametrize("name", FAMILIES)
def test_every_block_is_compiled_once_per_latent_shape(
    name: str, small: Callable[[str], Small], graphs: Graphs
) -> None:
    """Train three steps on each of two latent shapes."""
    made = small(name)
    checkpointed = made.family.read("phase1.yaml").get("gradient_checkpointing", False)
    losses = {}
    for compiled in (False, True):
        changes = {"global_batch_size": 4, "microbatch_size": 2, "max_steps": 6, "compile": compiled}
        changes |= {"gradient_checkpointing": checkpointed}
        config = TrainConfig.model_validate(small_run(made, f"compiled-{compiled}", **changes))
        step = started(config).train_step
        whole, cut = shapes(config)
        losses[compiled] = [step(batch, number).sums.total for number, batch in enumerate([whole, cut])]
        num_graphs = len(graphs.made)
        calls = graphs.calls
        losses[compiled] += [step(batch, 2 + number).sums.total for number, batch in enumerate([whole, cut] * 2)]
    blocks = 1 if name in UNETS else len(find_blocks(step.network))
    assert losses[True] == pytest.approx(losses[False], rel=1e-5)
    assert calls == 2 * NUM_MICROBATCHES * blocks * (1 + checkpointed) and graphs.calls == 3 * calls
    assert len(graphs.made) == num_graphs
    assert not counters["graph_break"]


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
@pytest.mark.parametrize("name", ["sdxl", "sd3", "flux1"])
def test_every_block_of_a_sharded_network_is_compiled(name: str, small: Callable[[str], Small], graphs: Graphs) -> None:
    """These families shard their weights as shipped."""
    config = TrainConfig.model_validate(small_run(small(name), "sharded", global_batch_size=4))
    prepared = prepare(config)
    stir(prepared.network)
    loss = DiffusionLoss(config.objective, prepared.spec, torch.device("cpu"), prepared.backbone)
    sharded = copy.deepcopy(prepared.network)
    shard_weights(sharded, "full", "float32")
    compile_network(sharded, 2, by_block=True)
    found: list[float] = []
    expected: list[float] = []
    for number, batch in enumerate([*shapes(config), *shapes(config)]):
        for network, losses in ((prepared.network, expected), (sharded, found)):
            noisy = loss.add_noise(batch, Draws(0, number, batch.slots))
            total = loss(network, noisy).total.sum()
            total.backward()
            losses.append(float(total.detach()))
        if number == 1:
            num_graphs = len(graphs.made)
    assert found == pytest.approx(expected, rel=1e-5)
    assert graphs.calls == 4 * len(find_blocks(prepared.network))
    assert len(graphs.made) == num_graphs
    assert not counters["graph_break"]
