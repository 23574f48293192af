"""Linear layers that multiply in float8: their choice, their rounding, and refusals."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from shards.base.config import load_config
from shards.base.device import Precision
from shards.base.errors import RequestError
from tests.families.small import FAMILIES, Small, make_small, stir
from tests.families.starting import small_run
from tests.graphs import capture_graphs
from tests.runs import train_fields, write_config
from train.config import TrainConfig
from train.data.draws import Draws
from train.data.loader import Loader
from train.model.float8 import float8_problem, large_linears, use_float8
from train.model.network import compile_network
from train.objective.config import RepaConfig
from train.objective.loss import DiffusionLoss
from train.prepare import prepare
from train.run.preflight import World, check_launch
from train.setup import build_step

NUM_STEPS = 60


class Layers(nn.Module):
    """Linear layers that read different numbers of rows."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.wide = nn.Linear(3072, 12288)
            self.narrow = nn.Linear(320, 2560)
            self.odd = nn.Linear(3080, 12288)
            self.modulation = nn.Linear(3072, 18432)
            self.twice = nn.Linear(4096, 4096)
            self.unused = nn.Linear(8192, 8192)

    def forward(self) -> None:
        for layer in (self.wide, self.narrow, self.odd, self.twice, self.twice):
            layer(torch.empty(1, 1024, layer.in_features, device="meta"))
        self.modulation(torch.empty(1, self.modulation.in_features, device="meta"))


def test_layers_are_chosen_by_their_size() -> None:
    """The limits follow from 6 / inputs + 10 / outputs + 18 / rows < 0.01: more than 2513 rows for `wide`, 2954 for
    `twice`, which reads 1024 rows per sample two times."""
    network = Layers()
    assert [large_linears(network, network, size) for size in (1, 2, 3)] == [[], ["twice"], ["wide", "twice"]]
    assert large_linears(network, network, 1024) == ["wide", "twice"]
    assert large_linears(network, network, 4096) == ["wide", "twice", "modulation"]


def test_processes_that_cannot_use_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    def problem(precision: Precision = "bfloat16", device: str = "cuda") -> str | None:
        return float8_problem(torch.device(device), precision)

    assert (problem(device="cpu") or "").startswith("float8: The CPU has no fast float8 matrix products. They need an")
    found = SimpleNamespace(get_device_capability=lambda device: (8, 0), get_device_name=lambda device: "NVIDIA A100")
    for module in ("shards.base.device", "train.model.float8"):
        monkeypatch.setattr(f"{module}.device_module", lambda: found)
    assert re.match(r"float8: NVIDIA A100 has no fast float8 .* Set float8 to false\.$", problem() or "")
    found.get_device_capability = lambda device: (8, 9)
    assert "does not support precision float32. Set precision to bfloat16" in (problem("float32") or "")
    versions = iter(["0.9.0", "0.18.0", "0.20.0"])
    monkeypatch.setattr("train.model.float8.version", lambda name: next(versions))
    assert re.search(r"needs torchao 0\.18 or later; \S+ has 0\.9\.0\. .*'torchao>=0\.18'", problem() or "")
    assert problem() is None and problem() is None


def test_a_problem_of_one_process_is_raised_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    other = (1, 1, "float8: The other process has a problem.")
    monkeypatch.setattr("accelerate.utils.gather_object", lambda own: [*own, other])
    with pytest.raises(RequestError, match="The other process has a problem"):
        check_launch(Accelerator(cpu=True), World(2, 1))


def test_float8_needs_compile(tmp_path: Path) -> None:
    fields = train_fields(tmp_path, tmp_path / "run", float8=True)
    with pytest.raises(RequestError, match="float8 needs compile"):
        load_config(TrainConfig, write_config(tmp_path / "config.yaml", fields), [], "train")


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return make_small(FAMILIES["flux1"], tmp_path_factory.mktemp("flux1"))


def test_a_run_on_a_cpu_is_refused(flux: Small) -> None:
    changes = {"compile": True, "float8": True, "precision": "bfloat16"}
    with pytest.raises(RequestError, match="float8: The CPU has no fast"):
        prepare(TrainConfig.model_validate(small_run(flux, "refused", **changes)), Accelerator(cpu=True))


@pytest.mark.heavy
def test_only_compiled_layers_without_hooks_use_float8(
    flux: Small, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All layers of the small network count as large. Its blocks are compiled separately."""
    monkeypatch.setattr("train.model.float8.BYTES_SAVED", 100.0)
    monkeypatch.setattr("train.model.float8.FLOAT8_MULTIPLE", 1)
    used: list[str] = []
    monkeypatch.setattr("train.setup.use_float8", lambda network, layers: used.extend(layers))
    aligned = "single_transformer_blocks.0.proj_out"
    config = TrainConfig.model_validate(small_run(flux, "chosen", float8=True, compile=True, precision="bfloat16"))
    prepared = prepare(config)
    build_step(config.model_copy(update={"repa": RepaConfig(layer=aligned)}), prepared, Accelerator(cpu=True))
    assert sorted([*used, aligned]) == sorted(linears(prepared.network))
    assert f"float8: {len(used)} linear layers are large enough" in capsys.readouterr().out


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to float8 with one scale for the whole tensor, and return float64."""
    scale = torch.finfo(dtype).max / values.abs().max()
    return (values * scale).to(dtype).double() / scale.double()


@pytest.mark.slow
@pytest.mark.float8
def test_layers_multiply_rounded_values() -> None:
    """Compare output and gradients with products in float64, of values rounded by torch's casts."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 8))
    names = list(network.state_dict())
    use_float8(network, ["0"], emulated=True)
    assert list(network.state_dict()) == names and type(network[1]) is nn.Linear
    inputs, gradient = torch.randn(5, 7, 64, requires_grad=True), torch.randn(5, 7, 48)
    layer = network[0]
    assert isinstance(layer, nn.Linear)
    weight, bias = layer.weight.detach(), layer.bias.detach()
    output = layer(inputs)
    output.backward(gradient)
    x, w = rounded(inputs.detach(), torch.float8_e4m3fn), rounded(weight, torch.float8_e4m3fn)
    g = rounded(gradient, torch.float8_e5m2)
    expected = [x @ w.T + bias, g @ w, torch.einsum("abo,abi->oi", g, x), gradient.sum((0, 1))]
    for found, wanted in zip([output, inputs.grad, layer.weight.grad, layer.bias.grad], expected, strict=True):
        assert found is not None
        torch.testing.assert_close(found.double(), wanted.double(), rtol=1e-5, atol=1e-5)
    exact = inputs @ weight.T + bias
    assert 0.01 < (output - exact).norm() / exact.norm() < 0.06


def linears(network: nn.Module) -> list[str]:
    """Return the names of the linear layers in the blocks of a FLUX.1."""
    return [name for name, part in network.named_modules() if type(part) is nn.Linear and "blocks" in name]


def trained(flux: Small, with_float8: bool, compiled: bool = False) -> list[float]:
    """Train a small FLUX.1 on one batch, and return its losses."""
    config = TrainConfig.model_validate(small_run(flux, "parity", global_batch_size=8))
    prepared = prepare(config)
    network = prepared.network
    stir(network)
    if with_float8:
        use_float8(network, linears(network), emulated=True)
    if compiled:
        compile_network(network, 1, by_block=True)
    loss = DiffusionLoss(config.objective, prepared.spec, torch.device("cpu"), prepared.backbone)
    batch = next(iter(Loader(config.data, prepared.spec, 8, 0, 0, torch.arange(8))))
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    losses = []
    for _ in range(NUM_STEPS):
        total = loss(network, loss.add_noise(batch, Draws(0, 0, batch.slots))).total.mean()
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        losses.append(float(total.detach()))
    return losses


@pytest.mark.slow
@pytest.mark.float8
def test_losses_stay_close(flux: Small) -> None:
    exact, found = trained(flux, False), trained(flux, True)
    assert exact[-1] < exact[0] / 2
    assert found != exact and found == pytest.approx(exact, rel=0.1)  # 6 % apart when this was written


@pytest.mark.slow
@pytest.mark.float8
def test_blocks_compile_without_breaks(flux: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    with capture_graphs(monkeypatch) as graphs:
        compiled = trained(flux, True, compiled=True)
    assert len(graphs.captured) == 2 and graphs.calls == 2 * NUM_STEPS and not graphs.breaks
    assert compiled == pytest.approx(trained(flux, True), rel=1e-5)
