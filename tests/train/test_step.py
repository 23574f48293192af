"""The training step: it never makes the host wait for the device, and launches few kernels besides the network's.

Meta tensors have no values, so any operation that reads a value on the host raises an error.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch._dynamo.backends.distributed import DDPOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from shards.format.text import quantise
from tests.graphs import Graphs
from tests.runs import ONE_LEVEL_UNET, TRANSFORMER, UNET, curve, train_run
from tests.train.specs import CHANNELS, make_batch, spec
from train.data.batch import Batch
from train.data.loader import Loader
from train.data.spec import DataConfig
from train.data.streams import open_data
from train.model.config import AdamWConfig, DdpConfig, EmaConfig, ScheduleConfig
from train.model.ema import Ema
from train.model.inputs import Conditioning
from train.model.network import build_network, compile_network
from train.model.optimizer import Optimizer, build_optimizer
from train.model.tensors import bytes_of
from train.objective.config import ObjectiveConfig, ValidationConfig
from train.objective.latents import StoredLatents
from train.objective.loss import DiffusionLoss
from train.objective.validation import Validation
from train.step import TrainStep, place_network

pytestmark = pytest.mark.heavy

META = torch.device("meta")
MICROBATCHES, SIZE, SIDE = 4, 2, 8
MOST_LAUNCHES = 40
"""Bound on kernel launches per microbatch, for a step of four microbatches (64 images on each of 8 GPUs)."""
NO_LAUNCH = ("empty", "empty_like", "empty_strided", "new_empty_strided", "detach", "_unsafe_view", "alias")
OBJECTIVES: dict[str, dict[str, Any]] = {
    "sample, weighted, offset noise": {"prediction": "sample", "min_snr_gamma": 5.0, "offset_noise": 0.1},
    "flow, logit-normal": {
        "prediction": "flow_matching",
        "shift": {"factor": 3.0},
        "timestep_sampling": "logit_normal",
        "weighting": "sigma_sqrt",
    },
    "flow, mode": {"prediction": "flow_matching", "timestep_sampling": "mode", "weighting": "cosmap"},
    "flow, cosmap": {"prediction": "flow_matching", "timestep_sampling": "cosmap", "weighting": "sigma_sqrt"},
    "velocity, weighted, offset noise": {
        "prediction": "v_prediction",
        "zero_terminal_snr": True,
        "min_snr_gamma": 5.0,
        "offset_noise": 0.1,
    },
}


class Watch(TorchDispatchMode):
    """Counts the kernels that a device would launch, and records the copies for which the host would wait."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.waits: list[str] = []
        self.is_counting = True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, function._overloadpacket.__name__
        result = function(*args, **kwargs)
        leaves = torch.utils._pytree.tree_leaves((args, kwargs, result))
        devices = {leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)}
        returns = function._schema.returns
        is_view = bool(returns) and all(
            value.alias_info is not None and not value.alias_info.is_write for value in returns
        )
        if self.is_counting and "meta" in devices and not is_view and name not in NO_LAUNCH:
            self.launches[name] += 1
        non_blocking = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
        if devices == {"cpu", "meta"} and name in ("_to_copy", "copy_") and not non_blocking:
            self.waits.append(name)
        return result

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count kernels launched in the context."""
        self.is_counting = False
        yield
        self.is_counting = True


class FakeNetwork(nn.Module):
    """A network whose forward and backward passes launch no counted kernel."""

    def __init__(self, watch: Watch):
        super().__init__()
        self.weight = nn.Parameter(torch.empty((), device=META))
        self.watch = watch

    def forward(self, latents: Tensor, timestep: Tensor, return_dict: bool, **_: Tensor) -> tuple[Tensor]:
        watch = self.watch

        class Nothing(torch.autograd.Function):
            @staticmethod
            def forward(context: Any, latents: Tensor, weight: Tensor) -> Tensor:
                with watch.paused():
                    return torch.empty_like(latents)

            @staticmethod
            def backward(context: Any, gradient: Tensor) -> tuple[None, Tensor]:
                with watch.paused():
                    return None, torch.empty((), device=META)

        return (Nothing.apply(latents, self.weight),)


class ReduceError(Exception):
    """Raised by the fake accelerator when validation reduces its sums, just before the host would wait for them."""


class FakeAccelerator:
    """A fake of the parts of accelerate that a step uses, on the meta device."""

    device, scaler, num_processes, process_index = META, None, 1, 0

    def no_sync(self, model: nn.Module) -> Any:
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def prepare_optimizer(self, adamw: torch.optim.AdamW) -> torch.optim.AdamW:
        return adamw

    def reduce(self, both: Tensor, how: str) -> Tensor:
        raise ReduceError

    def clip_grad_norm_(self, parameters: Any, norm: float) -> Tensor:
        return torch.nn.utils.clip_grad_norm_(parameters, norm)


NO_OPTIMIZER: Any = SimpleNamespace(step=lambda *_: (None, None))
STEP = 3
"""Number of the step in most tests; the first is 0."""


def make_step(network: nn.Module, loss: DiffusionLoss, optimizer: Any = NO_OPTIMIZER, **fields: Any) -> TrainStep:
    """Build a step with microbatches of `SIZE`, on the meta device unless `fields` contain an accelerator."""
    defaults: dict[str, Any] = {"accelerator": FakeAccelerator(), "weight_casts": nullcontext()}
    return TrainStep(network=network, loss=loss, optimizer=optimizer, microbatch_size=SIZE, **defaults | fields)


def make_share(
    width: int, tokens: int, captions: int = 1, size: int = MICROBATCHES * SIZE, shape: tuple[int, int] = (SIDE, SIDE)
) -> Batch:
    """Return a rank's share of a global batch, with `captions` captions per sample."""
    latents = torch.randn(size, 2 * CHANNELS, *shape).half()
    text = torch.randn(captions * size, tokens, width).half()
    several = torch.full((size,), captions) if captions > 1 else None
    lengths = torch.full((len(text),), tokens)
    return make_batch([""] * size, torch.arange(size), latents, text, num_tokens=lengths, num_captions=several)


def loss_of(objective: dict[str, Any], trim: bool, width: int, tokens: int) -> DiffusionLoss:
    return DiffusionLoss(
        ObjectiveConfig.model_validate(objective), spec(torch.randn(tokens, width).half(), trim=trim), META
    )


def test_a_step_outside_a_run_trains_as_a_run_does(latents: Path, tmp_path: Path) -> None:
    """A loop over a latents root as in a notebook, without run folder, launcher or log, has a run's exact losses."""
    streams, schedule = [{"root": latents, "bucket": "64x64"}], ScheduleConfig(warmup_steps=3)
    config = DataConfig.model_validate({"streams": streams, "num_workers": 0, "num_canonical_nodes": 4})
    root = open_data(config, global_batch_size=8)
    loader = Loader(config, root, 8, seed=0, step=0, slots=torch.arange(8))
    accelerator, network = Accelerator(cpu=True), build_network(TRANSFORMER, seed=0)
    place_network(network, accelerator.device)
    adamw = build_optimizer(dict(network.named_parameters()), AdamWConfig())
    optimizer = Optimizer(adamw, accelerator, AdamWConfig(), schedule, max_steps=3)
    loss = DiffusionLoss(ObjectiveConfig(), root, accelerator.device)
    train_step = TrainStep(accelerator, network, loss, optimizer, microbatch_size=4)
    losses = [train_step(batch, step).sums.total / 8 for step, batch in zip(range(3), loader, strict=False)]

    assert losses == curve(train_run(latents, tmp_path / "run", max_steps=3))[0]


@pytest.mark.parametrize(
    ("objective", "trim"),
    [*((fields, False) for fields in OBJECTIVES.values()), ({}, True)],
    ids=[*OBJECTIVES, "epsilon, trimmed captions"],
)
def test_few_kernel_launches_and_no_wait_for_the_device(
    objective: dict[str, Any], trim: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step draws, adds noise, decodes captions, and sums losses. Fused draws are replaced by the two kernels that
    they take on a device (tests/train/data)."""
    watch = Watch()

    def two_kernels(counter: tuple[Tensor, ...], key: tuple[int, int]) -> list[Tensor]:
        words = torch.zeros(4, counter[1].shape[0], counter[0].shape[0], dtype=torch.int64, device=META)
        return list(words.zero_().unbind())

    monkeypatch.setattr("train.data.draws.fused_philox", lambda: two_kernels)
    loss, network = loss_of(objective, trim, 12, 16), FakeNetwork(watch)
    train_step, batch = make_step(network, loss, compiled=True), make_share(12, 16)
    train_step(batch, STEP)  # fills the caches that all steps share
    with watch:
        train_step(batch, STEP)
    print(f"\n{sum(watch.launches.values()) / MICROBATCHES:.1f} kernels per microbatch: {dict(watch.launches)}")
    assert sum(watch.launches.values()) <= MOST_LAUNCHES * MICROBATCHES
    assert watch.launches["bitwise_xor"] == 0 and not watch.waits
    with pytest.raises(ReduceError):
        Validation([batch], 0, ValidationConfig())(network, loss, FakeAccelerator(), SIZE)


def test_captions_are_decoded_one_microbatch_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding the T5 captions of a whole share at once would take gigabytes, so they stay encoded until needed."""
    decoded, decode = [], StoredLatents.conditioning

    def conditioning(self: StoredLatents, batch: Batch, dropped: Tensor) -> Conditioning:
        assert batch.columns["text_latents.text"].dtype == torch.uint8
        decoded.append((len(batch), len(dropped)))
        return decode(self, batch, dropped)

    monkeypatch.setattr(StoredLatents, "conditioning", conditioning)
    tokens, width = 16, 12
    codes, scales = quantise(torch.randn(MICROBATCHES * SIZE, tokens, width))
    latents, slots = torch.randn(len(codes), 2 * CHANNELS, SIDE, SIDE).half(), torch.arange(len(codes))
    batch = make_batch([""] * len(codes), slots, latents, codes, text_scales=scales)
    make_step(FakeNetwork(Watch()), loss_of({}, False, width, tokens))(batch, STEP)
    assert decoded == [(SIZE, SIZE)] * MICROBATCHES


def test_a_whole_step_never_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A U-Net with trimmed captions, three per sample, gradient clipping, AdamW and a moving average, without fused
    draws."""
    optimizers = sys.modules["torch.optim.optimizer"]  # torch.optim hides this module's name
    monkeypatch.setattr(optimizers, "_get_fused_kernels_supported_devices", lambda: ["meta"])
    unet = build_network(UNET, None)
    width, tokens = unet.config.cross_attention_dim, 5
    adamw = build_optimizer(dict(unet.named_parameters()), AdamWConfig())
    optimizer = Optimizer(adamw, FakeAccelerator(), AdamWConfig(), ScheduleConfig(), 10)
    ema, batch = Ema(EmaConfig(start_step=1)), make_share(width, tokens, captions=3)
    ema.begin(unet.named_parameters())
    train_step = make_step(unet, loss_of({}, True, width, tokens), optimizer, averages={"ema": ema})
    train_step.add_noise(batch, 0)  # fills the caches that all steps share
    watch = Watch()
    with watch:
        result = train_step(batch, STEP)
    assert result.grad_norm.device == META
    assert watch.launches["convolution_backward"] and watch.launches["_fused_adamw_"]
    assert not watch.waits


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    """A bfloat16 accelerator. Its state is reset, because accelerate keeps the precision for the whole process."""
    AcceleratorState._reset_state()
    yield Accelerator(mixed_precision="bf16", cpu=True)
    AcceleratorState._reset_state()


class Casts(TorchDispatchMode):
    """Counts casts of weights to bfloat16."""

    def __init__(self, weights: list[nn.Parameter]):
        super().__init__()
        self.weights, self.count = {weight.data_ptr() for weight in weights}, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function._overloadpacket.__name__ == "_to_copy" and (kwargs or {}).get("dtype") == torch.bfloat16:
            self.count += args[0].data_ptr() in self.weights
        return function(*args, **(kwargs or {}))


def test_weights_are_cast_once_per_step(accelerator: Accelerator) -> None:
    """The gradients are bit-equal to those of a step that casts the weights in every microbatch."""
    cpu = torch.device("cpu")
    width, tokens = 12, 5
    gradients, counts = [], []
    for casts_per_microbatch in (True, False):
        unet = build_network(UNET, 0)
        width = unet.config.cross_attention_dim
        loss = DiffusionLoss(ObjectiveConfig(), spec(torch.ones(tokens, width).half()), cpu)
        model = accelerator.prepare_model(unet, device_placement=False)
        weight_casts = nullcontext() if casts_per_microbatch else None
        train_step = make_step(unet, loss, model=model, accelerator=accelerator, weight_casts=weight_casts)
        torch.manual_seed(5)
        with Casts(list(unet.parameters())) as casts:
            train_step(make_share(width, tokens, size=3), STEP)
        counts.append(casts.count)
        gradients.append([weight.grad for weight in unet.parameters()])
    assert counts[0] == 2 * counts[1] > 0
    assert all(a is not None and b is not None and a.equal(b) for a, b in zip(*gradients, strict=True))


@pytest.mark.usefixtures("accelerator")
def test_a_placed_network_uses_attention_kernels_that_are_safe_for_training() -> None:
    torch.backends.cuda.enable_flash_sdp(True)
    place_network(nn.Linear(2, 2), torch.device("cpu"))
    assert not torch.backends.cuda.flash_sdp_enabled()


def test_each_latent_shape_compiles_one_graph(graphs: Graphs, accelerator: Accelerator) -> None:
    """All microbatches of a step share a graph, including the smaller last one, and validation with other batch sizes
    uses it, too. A second latent shape compiles a second graph. Captions are trimmed."""
    unet = build_network(ONE_LEVEL_UNET, 0)
    compile_network(unet, num_shapes=2)
    model = accelerator.prepare_model(unet, device_placement=False)
    width, tokens, cpu = unet.config.cross_attention_dim, 5, torch.device("cpu")
    loss = DiffusionLoss(ObjectiveConfig(), spec(torch.randn(tokens, width).half(), trim=True), cpu)
    train_step = make_step(unet, loss, model=model, accelerator=accelerator, compiled=True)
    for number, shape in enumerate([(8, 8), (16, 4)], 1):
        train_step(make_share(width, tokens, size=3, shape=shape), STEP)
        held_out = [make_share(width, tokens, size=size, shape=shape) for size in (4, 1)]
        fields = Validation(held_out, 0, ValidationConfig(dealt=True))(unet, loss, accelerator, SIZE)
        assert len(fields["val_loss_by_timestep"]) == 8
        assert len(graphs.captured) == number and not graphs.breaks


def test_ddp_has_few_large_buckets() -> None:
    """Dynamo splits the graph wherever a gradient bucket is full, so SD2 has at most eight subgraphs. With DDP's
    default bucket size of 25 MB, there would be 71."""
    handler = DdpConfig().handler().to_kwargs()
    assert handler["gradient_as_bucket_view"] and 250 <= handler["bucket_cap_mb"] <= 500
    unet = build_network(Path("configs/unet/sd2-base.json"), None)
    assert 4 < bytes_of(dict(unet.named_parameters())) / (handler["bucket_cap_mb"] * 2**20) <= 7


class OneRank(FakeAccelerator):
    """The only rank of a DDP model, which records the memory of the gradients after each backward pass."""

    device = torch.device("cpu")

    def __init__(self, weights: list[nn.Parameter]):
        self.weights, self.storages = weights, list[set[int]]()

    def no_sync(self, model: nn.Module) -> Any:
        return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()

    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        gradients = [weight.grad for weight in self.weights if weight.grad is not None]
        assert len(gradients) == len(self.weights)
        self.storages.append({gradient.untyped_storage().data_ptr() for gradient in gradients})


def test_microbatches_accumulate_in_ddps_buckets(tmp_path: Path) -> None:
    """Gradients outside the buckets would take a second copy of their memory. The weights are those without DDP, also
    after a step with a NaN."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    results = []
    try:
        for is_replicated in (False, True):
            unet, cpu = build_network(UNET, 0), torch.device("cpu")
            tokens, width = 5, unet.config.cross_attention_dim
            loss = DiffusionLoss(ObjectiveConfig(), spec(torch.ones(tokens, width).half()), cpu)
            rank = OneRank(list(unet.parameters()))
            adamw = build_optimizer(dict(unet.named_parameters()), AdamWConfig())
            optimizer = Optimizer(adamw, cast(Accelerator, rank), AdamWConfig(), ScheduleConfig(warmup_steps=0), 10)
            model = DistributedDataParallel(unet, **DdpConfig().handler().to_kwargs()) if is_replicated else unet
            train_step = make_step(unet, loss, optimizer, model=model, accelerator=rank)
            torch.manual_seed(5)
            shares = [make_share(width, tokens, size=2 * SIZE) for _ in range(3)]
            shares[1].columns["image_latents"][0, 0] = torch.nan
            train_step.settle_gradient_order(shares[0], 0)
            skipped = [float(train_step(share, step).skipped) for step, share in enumerate(shares)]
            assert skipped == [0, 1, 0] and len(rank.storages) == 6
            results.append(list(unet.parameters()))
        buckets = rank.storages[1]  # after the first pass that all-reduces
        assert rank.storages == [buckets] * 6
        assert all(map(torch.equal, *results))
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_ddp_splits_stable_diffusion_2_into_at_most_eight_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    splitter = DDPOptimizer(DdpConfig().bucket_mb * 2**20, lambda graph, inputs: graph.forward)
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend=splitter.compile_fn))
    unet = build_network(Path("configs/unet/sd2-base.json"), None)
    compile_network(unet, num_shapes=1)
    latents, text = torch.empty(2, 4, 32, 32, device=META), torch.empty(2, 77, 1024, device=META)
    unet(latents, timestep=torch.empty(2, device=META), encoder_hidden_states=text, return_dict=False)
    assert 4 < len(splitter.buckets) <= 8, [bucket.size for bucket in splitter.buckets]
    torch.compiler.reset()


def test_the_watch_detects_a_wait() -> None:
    with pytest.raises(RuntimeError, match="meta"):
        torch.ones(3, device=META).sum().item()
    watch = Watch()
    with watch:
        torch.ones(3).to(META)
        torch.ones(3).to(META, non_blocking=True)
    assert watch.waits == ["_to_copy"]
