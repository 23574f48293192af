"""Text towers with quantised weights: accuracy, records in the root, and refusals."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import T5Config, T5EncoderModel

from precompute import describe
from precompute.config import PrecomputeConfig, describe_encoding
from precompute.encode.networks import DeviceSettings, Network, Precision, quantise
from shards.base.errors import RequestError, UnfitNode
from shards.derive.conversion import plan_conversion
from shards.format.encoding import EncodingRecord
from shards.format.receipts import Receipt
from shards.format.towers import Quantised
from shards.open import open_store
from shards.root.committed import load_receipts
from shards.tools.verify import verify_root
from tests.conftest import encode_all, folder_of
from tests.tiny_towers import config_of, make_towers, texts

LARGEST_ERROR: dict[Quantised, float] = {"int8": 0.02, "float8": 0.08}
"""Norm of the difference of hidden states, as a share of theirs; docs/how-to/towers.md has what was measured."""


@pytest.fixture(scope="module")
def towers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_towers(tmp_path_factory.mktemp("towers"))


def config(models: Path, tars: Path, root: Path, towers: Path, weights: str, **changes: Any) -> PrecomputeConfig:
    """Return a config with a quantised T5 and an ordinary CLIP."""
    return config_of(models, tars, root, towers, texts=texts(towers, models, weights=weights), features={}, **changes)


@pytest.fixture
def as_if_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(describe, "find_spec", lambda name: name)


def record(models: Path, tars: Path, towers: Path, weights: str) -> EncodingRecord:
    return describe_encoding(config(models, tars, tars / "none", towers, weights))


def test_quantised_weights_change_the_encoding_id(
    models: Path, tars: Path, towers: Path, as_if_installed: None
) -> None:
    records = [record(models, tars, towers, weights) for weights in ("as_stored", "int8", "float8")]
    assert len({of.id for of in records}) == 3
    assert records[0].differences(records[1]) == ["texts.t5.quantised: None ≠ 'int8'"]
    assert all(EncodingRecord.parse(of.sealed(), "encoding.json") == of for of in records)


def test_a_root_of_the_unquantised_tower_is_refused(
    models: Path, tars: Path, towers: Path, as_if_installed: None
) -> None:
    source, target = (record(models, tars, towers, weights) for weights in ("as_stored", "int8"))
    assert plan_conversion(source, target, may_encode=True).reencoded == {"t5"}
    with pytest.raises(RequestError, match="t5"):
        plan_conversion(source, target)


def test_a_node_without_torchao_is_refused(
    models: Path, tars: Path, towers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(describe, "find_spec", lambda name: None)
    wanted = r"texts\.t5\.weights: float8 weights need torchao, which is not installed\. Install it here and on"
    with pytest.raises(RequestError, match=wanted):
        record(models, tars, towers, "float8")
    for module in ("torchao", "torchao.quantization"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        UnfitNode, match=r"has no torchao .*but a text tower with int8 weights needs torchao\. Install it on that node"
    ):
        quantise(nn.Linear(2, 2), "int8")
    with pytest.raises(ValueError, match=r"texts\.t5\.weights: matrix products with int8 weights overflow float16"):
        config(models, tars, tars / "none", towers, "int8", precision="float16")


def t5() -> T5EncoderModel:
    """Return a random T5 with layers wide enough for errors to average out as in large ones."""
    torch.manual_seed(3)
    fields = {"vocab_size": 64, "d_model": 128, "d_kv": 16, "d_ff": 256, "num_layers": 4, "num_heads": 8}
    return T5EncoderModel(T5Config(**fields, feed_forward_proj="gated-gelu")).eval()


def states_of(model: nn.Module, precision: Precision) -> tuple[Tensor, Network]:
    ids = torch.randint(0, 64, (4, 24), generator=torch.Generator().manual_seed(5))
    site = DeviceSettings(torch.device("cpu"), precision)
    network = Network(model, lambda t5, ids: (t5(ids).last_hidden_state,), site)
    return network.start((ids,), len(ids))()[0].float(), network


def weight_bytes(model: nn.Module) -> tuple[int, int]:
    """Return the bytes and the number of weights of all linear layers."""
    layers = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    return sum(weight.qdata.nbytes + weight.scale.nbytes for weight in layers), sum(w.numel() for w in layers)  # type: ignore[attr-defined]


@pytest.mark.parametrize("to", LARGEST_ERROR)
@pytest.mark.slow
@pytest.mark.quantised
def test_the_error_of_quantised_weights(to: Quantised) -> None:
    exact, _ = states_of(t5(), "float32")
    precisions: tuple[Precision, ...] = ("float32", "bfloat16")
    for precision in precisions:
        found, network = states_of(quantise(t5(), to), precision)
        plain, _ = states_of(t5(), precision)
        error, without = (float((of - exact).norm() / exact.norm()) for of in (found, plain))
        print(f"\n{to} in {precision}: {error:.2%}; not rounded: {without:.2%}")
        assert without < error < LARGEST_ERROR[to]
        for model in {network.model, network.lowered}:
            held, count = weight_bytes(model)
            assert count <= held < 1.05 * count


@pytest.mark.slow
@pytest.mark.quantised
@pytest.mark.parametrize("to", LARGEST_ERROR)
def test_a_root_of_a_quantised_tower(models: Path, tars: Path, tmp_path: Path, towers: Path, to: Quantised) -> None:
    """The bytes are the same with towers one by one, and receipts record the version of torchao."""
    stored = []
    for how in ("together", "one_by_one"):
        workers = {"num_gpus": 0, "num_cpus": 1, "decode_threads": 2, "batch_size": 8, "towers": how}
        asked = config(models, tars, tmp_path / how, towers, to, workers=workers, precision="bfloat16")
        encode_all(asked, models)
        store = open_store(asked.output)
        assert list(verify_root(store)) == []
        receipts: list[Receipt] = load_receipts(store)
        assert all("torchao" in receipt.software for receipt in receipts)
        parts = sorted(path for path in folder_of(asked).glob("*x*/*/*.mds"))
        assert parts
        stored.append({str(path.relative_to(folder_of(asked))): path.read_bytes() for path in parts})
    assert stored[0] == stored[1]
