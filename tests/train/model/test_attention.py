"""Kernels that return NaN are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator

from bench.gpu_check.attention import error_in_float64, error_of
from shards.base.device import SAFE_KERNELS, AttentionKernel
from shards.base.errors import RequestError
from tests.runs import train_fields
from train.config import TrainConfig
from train.model.attention import check_attention, provoke
from train.prepare import prepare
from train.setup import build_step

CPU = torch.device("cpu")


@pytest.mark.heavy
def test_the_cpus_kernels_are_correct() -> None:
    """The inputs have the logits that they claim to have, and torch's kernels on CPUs are right on them."""
    errors: dict[AttentionKernel, float] = {"flash": 0.15, "math": 0.01}  # flash rounds the probabilities to bfloat16
    for kernel, error in errors.items():
        outcomes = list(provoke(CPU, kernel))
        supported = [outcome for outcome in outcomes if outcome.refusal is None]
        assert len(outcomes) == 8 and len(supported) >= 6
        assert all(outcome.refusal for outcome in outcomes if outcome not in supported)
        assert all(outcome.not_finite == 0 and error_in_float64(outcome) < error for outcome in supported)
    check_attention(SAFE_KERNELS, CPU, "bfloat16")  # a CPU lacks some of them


def test_the_inputs_have_a_log_sum_exp_at_which_cudnn_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = []

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: Any) -> torch.Tensor:
        sums.append((query.double() @ key.double().mT / 8).logsumexp(-1).max().item())
        return value.mean() + 0 * query

    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    list(provoke(CPU, "math"))
    assert len(sums) >= 8 and max(sums) < -88.7


@pytest.mark.parametrize("bad", ["output", "gradient"])
def test_a_kernel_that_returns_nan_is_refused(bad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = F.scaled_dot_product_attention

    def wrong(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: Any) -> Any:
        result = real(query, key, value, attn_mask)
        if key.shape[2] != 192:
            return result
        if bad == "output":
            return result * float("nan")
        result.register_hook(lambda gradient: gradient * float("nan"))
        return result

    monkeypatch.setattr(F, "scaled_dot_product_attention", wrong)
    message = (
        r"attention lists flash, but on this CPU with torch .*, this kernel returned \d+ values that are not finite "
        r"for 64 tokens, 192 keys, logits near -120\. .* Remove flash from `attention`\."
    )
    with pytest.raises(RequestError, match=message):
        check_attention(["flash"], CPU, "bfloat16")


def test_a_broken_gpu_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: torch.Tensor, **__: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(F, "scaled_dot_product_attention", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        check_attention(["flash"], CPU, "bfloat16")


def test_the_error_is_relative() -> None:
    reference = torch.tensor([3.0, 4.0])
    assert error_of(reference * 1.5, reference) == pytest.approx(0.5)


def test_a_run_uses_the_kernels_that_it_lists_and_tries_them_first(
    latents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels are tried only on accelerators, so this run is told that the CPU is one, with 80 GB."""
    calls: list[tuple[str, Any]] = []
    monkeypatch.setattr("train.prepare.is_accelerator", lambda device: True)
    monkeypatch.setattr("train.prepare.memory_of", lambda device: 80 << 30)
    monkeypatch.setattr("train.prepare.check_attention", lambda *tried: calls.append(("tried", tried)))
    monkeypatch.setattr("train.step.choose_attention", lambda *chosen: calls.append(("chosen", chosen)))
    fields = train_fields(latents, tmp_path / "run", attention=["math", "efficient"])
    config, accelerator = TrainConfig.model_validate(fields), Accelerator(cpu=True)
    build_step(config, prepare(config, accelerator), accelerator)
    assert calls == [("tried", (["math", "efficient"], CPU, "float32")), ("chosen", (CPU, ["math", "efficient"]))]
