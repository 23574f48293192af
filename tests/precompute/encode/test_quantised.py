"""Text towers with quantised weights: accuracy, records in the root, and refusals."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import T5Config, T5EncoderModel

from precompute.config import PrecomputeConfig, describe_encoding
from precompute.encode import networks
from precompute.encode.networks import DeviceSettings, Network
from precompute.encode.quantised import quantise
from shards.base.device import Precision
from shards.base.errors import RequestError, UnfitNode
from shards.derive.conversion import plan_conversion
from shards.format.encoding import EncodingRecord
from shards.format.towers import Quantised
from shards.open import open_store
from shards.tools.verify import verify_root
from tests.fixtures import encode_all, folder_of
from tests.tiny import make_samples, make_tar
from tests.tiny_towers import config_of, texts

CPU = torch.device("cpu")
BOTH: tuple[Quantised, ...] = ("int8", "float8")
LARGEST_ERROR: dict[Quantised, float] = {"int8": 0.02, "float8": 0.1}
"""Norm of the difference of hidden states, as a share of theirs; docs/how-to/towers.md has what was measured."""


@pytest.fixture(scope="module")
def towers(towers: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save small towers, with a T5 whose sizes are multiples of 16."""
    folder = shutil.copytree(towers, tmp_path_factory.mktemp("quantised") / "towers")
    torch.manual_seed(2)
    sizes = {"d_model": 32, "d_kv": 16, "num_heads": 2, "d_ff": 64}
    changed = T5Config.from_pretrained(folder / "t5").to_dict() | sizes
    T5EncoderModel(T5Config(**changed)).save_pretrained(folder / "t5")
    return folder


def config(models: Path, tars: Path, root: Path, towers: Path, weights: str, **changes: Any) -> PrecomputeConfig:
    """Return a config with a quantised T5 and an ordinary CLIP."""
    changes = {"precision": "bfloat16"} | changes
    return config_of(models, tars, root, towers, texts=texts(towers, models, weights=weights), features={}, **changes)


def record(models: Path, tars: Path, towers: Path, weights: str) -> EncodingRecord:
    return describe_encoding(config(models, tars, tars / "none", towers, weights))


def test_quantised_weights_change_the_encoding_id(models: Path, tars: Path, towers: Path) -> None:
    records = [record(models, tars, towers, weights) for weights in ("as_stored", *BOTH)]
    assert len({of.id for of in records}) == 3
    assert records[0].differences(records[1]) == ["texts.t5.quantised: None ≠ 'int8'"]
    assert all(EncodingRecord.parse(of.sealed(), "encoding.json") == of for of in records)


def test_a_root_of_the_unquantised_tower_is_refused(models: Path, tars: Path, towers: Path) -> None:
    source, target = (record(models, tars, towers, weights) for weights in ("as_stored", "int8"))
    assert plan_conversion(source, target, may_encode=True).reencoded == {"t5"}
    with pytest.raises(RequestError, match="t5"):
        plan_conversion(source, target)


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_float8_needs_bfloat16(models: Path, tars: Path, towers: Path, precision: str) -> None:
    with pytest.raises(ValueError, match=r"texts\.t5\.weights: float8 needs bfloat16\. Set precision to bfloat16"):
        config(models, tars, tars / "none", towers, "float8", precision=precision)
    config(models, tars, tars / "none", towers, "int8", precision=precision)


def test_a_node_that_cannot_multiply_in_float8_is_refused(
    models: Path, tars: Path, towers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **named: Any) -> Tensor:
        raise RuntimeError("scaled_mm is only supported on devices with compute capability 8.9\nand more")

    monkeypatch.setattr(torch.nn.functional, "scaled_mm", refuse)
    wanted = r"The CPU of node \S+ cannot multiply in float8 with torch \S+ \(scaled_mm is only [^\n]*8\.9\), but the"
    with pytest.raises(UnfitNode, match=wanted):
        encode_all(config(models, tars, tmp_path, towers, "float8"))


def int8_rows(rows: Tensor) -> Tensor:
    """Round each row of a matrix to int8, and return float64."""
    scale = rows.double().abs().amax(1, keepdim=True) / 127
    return (rows.double() / scale).round() * scale


def float8_rows(rows: Tensor) -> Tensor:
    """Round each row of a matrix to e4m3, and return float64. Numbers have 3 bits of mantissa, and below 2⁻⁶ a fixed
    exponent."""
    scale = rows.double().abs().amax(1, keepdim=True) / 448
    scaled = rows.double() / scale
    step = 2.0 ** (scaled.abs().log2().floor().clamp(min=-6) - 3)
    return (scaled / step).round() * step * scale


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("to", BOTH)
def test_layers_multiply_rounded_values(to: Quantised, bias: bool) -> None:
    """Compare outputs with products in float64. Rows of the input differ by up to 6 orders of magnitude; one is 0."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 48, bias=bias)
    quantised = quantise(nn.Sequential(layer), to)
    inputs = torch.randn(3, 5, 64) * 10.0 ** torch.randint(-3, 4, (3, 5, 1))
    inputs[0, 0] = 0
    rows = inputs.flatten(0, 1)
    weight = layer.weight.detach()
    if to == "int8":
        expected = rows.double() @ int8_rows(weight).T
    else:
        expected = float8_rows(rows).nan_to_num() @ float8_rows(weight).T
    if bias:
        expected += layer.bias.detach().double()
    with torch.inference_mode():
        found = quantised(inputs).flatten(0, 1).double()
    tolerance = {"int8": 1e-5, "float8": 0.01}[to]  # the outputs of float8 products are bfloat16
    assert ((found - expected).norm(dim=1) <= tolerance * expected.norm(dim=1)).all()


def test_rows_do_not_depend_on_the_batch() -> None:
    """In a batch with much larger numbers, a row has the same results."""
    torch.manual_seed(0)
    layer = quantise(nn.Sequential(nn.Linear(64, 48)), "float8")
    rows = torch.randn(32, 64, dtype=torch.bfloat16)
    others = rows.clone()
    others[1:] *= 1e4
    with torch.inference_mode():
        assert layer(rows)[0].equal(layer(others)[0])


def test_layers_that_float8_products_do_not_support_are_kept() -> None:
    model = quantise(nn.Sequential(nn.Linear(24, 32), nn.Linear(32, 24), nn.Linear(32, 32)), "float8")
    assert [type(layer) is nn.Linear for layer in model] == [True, True, False]


def t5() -> T5EncoderModel:
    """Return a random T5 with layers wide enough for errors to average out as in large ones."""
    torch.manual_seed(3)
    fields = {"vocab_size": 64, "d_model": 128, "d_kv": 16, "d_ff": 256, "num_layers": 4, "num_heads": 8}
    return T5EncoderModel(T5Config(**fields, feed_forward_proj="gated-gelu")).eval()


def states_of(model: nn.Module, precision: Precision) -> Tensor:
    return states_through(Network(model, encode, DeviceSettings(CPU, precision)))


def encode(t5: nn.Module, ids: Tensor) -> tuple[Tensor]:
    return (t5(ids).last_hidden_state,)


def states_through(network: Network) -> Tensor:
    """Encode four random captions."""
    ids = torch.randint(0, 64, (4, 24), generator=torch.Generator().manual_seed(5))
    return network.start((ids,), len(ids))()[0].float()


def num_bytes(model: T5EncoderModel) -> int:
    """Return the size of the blocks in bytes."""
    tensors = [*model.encoder.block.parameters(), *model.encoder.block.buffers()]
    return sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("to", BOTH)
def test_the_error_of_quantised_weights(to: Quantised) -> None:
    exact = states_of(t5(), "float32")
    precisions: tuple[Precision, ...] = ("float32", "bfloat16") if to == "int8" else ("bfloat16",)
    for precision in precisions:
        found, plain = states_of(quantise(t5(), to), precision), states_of(t5(), precision)
        error, without = (float((of - exact).norm() / exact.norm()) for of in (found, plain))
        print(f"\n{to} in {precision}: {error:.2%}; not rounded: {without:.2%}")
        assert without < error < LARGEST_ERROR[to]
    assert num_bytes(quantise(t5(), to)) < 1.1 * num_bytes(t5()) / 4


def test_float8_products_compile() -> None:
    def outputs(quantised: bool, precision: Precision, compiled: bool = False) -> Tensor:
        torch.manual_seed(3)
        layers = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
        model = quantise(layers, "float8") if quantised else layers
        network = Network(model, lambda each, rows: (each(rows),), DeviceSettings(CPU, precision, compiled))
        return network.start((torch.linspace(-2, 2, 32 * 64).reshape(32, 64).sin(),), 32)()[0].float()

    exact, found, compiled = outputs(False, "float32"), outputs(True, "bfloat16"), outputs(True, "bfloat16", True)
    assert not found.equal(compiled)  # kernels are fused, so it was compiled
    assert (compiled - exact).norm() / exact.norm() < LARGEST_ERROR["float8"]


def test_captions_that_overflow_float16_are_encoded_again() -> None:
    """The weights in the last layer overflow float16, so all states are those of the network in float32, to which the
    one in float16 lends its int8 weights."""
    model, expected = t5(), t5()
    for each in (model, expected):
        each.encoder.block[-1].layer[1].DenseReluDense.wo.weight.data *= 1e7
    network = Network(quantise(model, "int8"), encode, DeviceSettings(CPU, "float16"))
    held, lowered = ([id(buffer) for buffer in each.buffers()] for each in (network.model, network.lowered))
    assert network.model is not network.lowered and held == lowered
    exact = states_of(quantise(expected, "int8"), "float32")
    assert states_through(network).equal(exact) and exact.isfinite().all()


class ReadsWeight(T5EncoderModel):
    """A model that multiplies by a layer's weight itself."""

    def forward(self, *arguments: Any, **named: Any) -> Any:
        outputs = super().forward(*arguments, **named)
        outputs.last_hidden_state = (
            outputs.last_hidden_state @ self.encoder.block[0].layer[1].DenseReluDense.wi.weight.T
        )
        return outputs


def test_a_model_that_reads_a_weight_is_refused(
    models: Path, tars: Path, towers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(networks.transformers, "T5EncoderModel", ReadsWeight)
    record(models, tars, towers, "as_stored")
    wanted = r"texts\.t5\.weights: T5EncoderModel does not run with quantised weights \(.*Remove `weights` to use"
    with pytest.raises(RequestError, match=wanted):
        record(models, tars, towers, "int8")


def test_roots_of_quantised_towers(models: Path, tmp_path: Path, towers: Path) -> None:
    """The bytes are the same with towers one by one, and differ from those of a tower that is not quantised."""
    tars = make_tar(tmp_path / "tars", "00000", make_samples(0, 8, [(200, 150)])).parent

    def stored(weights: str, how: str) -> list[bytes]:
        workers = {"num_gpus": 0, "num_cpus": 1, "decode_threads": 2, "batch_size": 8, "towers": how}
        asked = config(models, tars, tmp_path / f"{weights}-{how}", towers, weights, workers=workers)
        encode_all(asked)
        assert list(verify_root(open_store(asked.output))) == []
        parts = sorted(path for path in folder_of(asked).glob("*x*/*/*.mds"))
        assert parts
        return [path.read_bytes() for path in parts]

    as_stored, int8, float8 = (stored(weights, "together") for weights in ("as_stored", *BOTH))
    assert as_stored != int8 and as_stored != float8
    assert stored("float8", "one_by_one") == float8
