"""Towers that run one by one: the stored bytes are the same, and the device holds one tower's weights at a time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import T5EncoderModel

from precompute.config import PrecomputeConfig, describe_encoding, make_recipe
from precompute.encode import networks
from precompute.encode.networks import DeviceSettings, Network, Offload
from precompute.encode.towers import DeviceClock, TextTowers
from precompute.encode.worker import load_towers
from tests.fixtures import encode_all, folder_of
from tests.graphs import Graphs
from tests.tiny_towers import config_of, texts


@dataclass
class Memory:
    """Fake device memory that tracks which copies of weights are alive."""

    copies: list[tuple[StorageWeakRef, int]] = field(default_factory=list)
    peak: int = 0
    sizes: dict[nn.Module, int] = field(default_factory=dict)
    """Network → bytes of its weights and buffers."""
    moved: list[nn.Module] = field(default_factory=list)
    """Networks in the order in which they were moved to the device."""
    timed: list[bool] = field(default_factory=list)
    """For each move, whether it counted as device time."""
    is_timed: bool = False

    def to_device(self, tensor: Tensor, device: torch.device) -> Tensor:
        copied = tensor.detach().clone()
        self.copies.append((StorageWeakRef(copied.untyped_storage()), copied.nbytes))
        self.copies = [(ref, size) for ref, size in self.copies if not ref.expired()]
        self.peak = max(self.peak, sum(size for _, size in self.copies))
        return copied


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:
    held = Memory()
    add, move = Offload.add, Offload._moved

    def added(self: Offload, model: nn.Module) -> None:
        add(self, model)
        held.sizes[model] = sum(tensor.nbytes for tensor in {id(t): t for t in self.on_host[model].values()}.values())

    def moved(self: Offload, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        held.timed.append(held.is_timed)
        held.moved += [model for model, waiting in self.on_host.items() if waiting is tensors]
        return move(self, tensors)

    monkeypatch.setattr(networks, "to_device", held.to_device)
    monkeypatch.setattr(Offload, "add", added)
    monkeypatch.setattr(Offload, "_moved", moved)
    yield held


def encoded(config: PrecomputeConfig) -> dict[str, bytes]:
    """Return all stored files by name; a part's folder is named by its content."""
    encode_all(config)
    files = [path for bucket in config.buckets for path in (folder_of(config) / bucket).glob("*.*/*")]
    assert len({path.parent.name for path in files}) == 4
    return {str(path.relative_to(folder_of(config))): path.read_bytes() for path in files}


def config(models: Path, tars: Path, root: Path, towers: Path, how: str, **changes: object) -> PrecomputeConfig:
    """Return a config with two buckets, several captions, and towers with three batch sizes."""
    workers = {"num_gpus": 0, "num_cpus": 1, "decode_threads": 2, "batch_size": 8, "towers": how}
    fields = {
        "buckets": ["64x64", "80x80"],
        "captions": ["txt", "json:url"],
        "precision": "bfloat16",
        "texts": texts(towers, models, batch_size=3),
        "features": {"dino": {"model": str(towers / "dino"), "batch_size": 5}},
    }
    return config_of(models, tars, root, towers, workers=workers, **(fields | changes))


def test_each_tower_is_moved_once_per_tar(
    models: Path, tars: Path, tmp_path: Path, towers: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images first, then captions by the tower with the smallest latents, then by the other. Moves are device time."""
    call = DeviceClock.__call__

    @contextmanager
    def timed(self: DeviceClock, tower: str) -> Iterator[None]:
        with call(self, tower):
            memory.is_timed = True
            yield
            memory.is_timed = False

    monkeypatch.setattr(DeviceClock, "__call__", timed)
    encoded(config(models, tars, tmp_path / "root", towers, "one_by_one", features={}))
    order = ["T5EncoderModel", "CLIPTextModelWithProjection"]  # latents of 24 × 12 numbers, and of 16 × 20 + 10
    of_a_tar = ["AutoencoderKL", *order]
    assert [type(model).__name__ for model in memory.moved] == [*order, *of_a_tar, *of_a_tar]
    assert memory.timed == [False, False, *[True] * 6]  # the empty caption belongs to the root and counts for no tar


def test_the_bytes_are_the_same_and_one_tower_is_on_the_device(
    models: Path, tars: Path, tmp_path: Path, towers: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although a row of each batch of captions overflows, which the float32 network encodes again."""
    run = Network._run

    def overflow(self: Network, inputs: list[Tensor], precision: str) -> tuple[Tensor, ...]:
        results = run(self, inputs, precision)  # type: ignore[arg-type]
        if precision == "float16" and inputs[0].dtype == torch.long:
            results[0][1] = 1e6  # beyond float16
        return results

    monkeypatch.setattr(Network, "_run", overflow)
    together = encoded(config(models, tars, tmp_path / "together", towers, "together", precision="float16"))
    assert not memory.moved
    one_by_one = config(models, tars, tmp_path / "one", towers, "one_by_one", precision="float16")
    assert encoded(one_by_one) == together
    both = {model for model in memory.moved if isinstance(model, T5EncoderModel)}
    assert len(both) == 2 and memory.peak == max(memory.sizes[model] for model in memory.moved)


def test_tied_weights_are_moved_once_and_restored() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)).eval().requires_grad_(False)
    model[1].weight = model[0].weight
    before, inputs = dict(model.named_parameters(remove_duplicate=False)), torch.randn(2, 4)
    expected, offload = model(inputs), Offload(torch.device("meta"))
    other = nn.Linear(1, 1)
    offload.add(model)
    offload.add(other)
    with offload.loaded(model):
        assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
        assert model[1].weight is model[0].weight and not model[0].weight.requires_grad
    with offload.loaded(other):
        assert all(model.get_parameter(name) is weight for name, weight in before.items())
        assert torch.equal(model(inputs), expected) and other.weight.is_meta


def test_a_failed_move_leaves_the_device_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(tensor: Tensor, device: torch.device) -> Tensor:
        raise torch.OutOfMemoryError("no room")

    offload, model = Offload(torch.device("cpu")), nn.Linear(2, 2)
    offload.add(model)
    moved: Callable[..., Tensor] = networks.to_device
    monkeypatch.setattr(networks, "to_device", no_room)
    with pytest.raises(torch.OutOfMemoryError), offload.loaded(model):
        pass
    assert offload.on_device is None and model.weight is offload.on_host[model]["weight"]
    monkeypatch.setattr(networks, "to_device", moved)
    with offload.loaded(model):
        assert offload.on_device is model


def test_weights_that_come_back_find_the_graph_that_was_compiled(memory: Memory, graphs: Graphs) -> None:
    cpu, inputs = torch.device("cpu"), torch.randn(2, 4)
    offload, models = Offload(cpu), [nn.Linear(4, 4) for _ in range(2)]
    expected = models[0](inputs)
    compiled, other = (
        Network(model, lambda m, x: (m(x),), DeviceSettings(cpu, "bfloat16", is_compiled, offload))
        for model, is_compiled in zip(models, (True, False), strict=True)
    )
    for _ in range(3):
        (found,) = compiled.start((inputs,), 2)()
        other.start((inputs,), 2)()
        torch.testing.assert_close(found.float(), expected, rtol=0.02, atol=0.02)
    assert len(graphs.captured) == 1 and len(memory.moved) == 6


def test_all_towers_of_a_worker_share_one_device(models: Path, tars: Path, tmp_path: Path, towers: Path) -> None:
    for how in ("together", "one_by_one"):
        asked = config(models, tars, tmp_path / "none", towers, how)
        loaded = load_towers(make_recipe(asked, describe_encoding(asked)), "cpu")
        networks = [loaded.image, *loaded.texts.values(), *loaded.features.values()]
        offloads = {network.offload for network in networks}
        assert (
            len(offloads) == 1
            and (None in offloads) == (how == "together")
            and loaded.one_by_one == (None not in offloads)
        )


def test_one_by_one_without_text_towers() -> None:
    assert TextTowers({}, 8, one_by_one=True).empty_caption() == {}
