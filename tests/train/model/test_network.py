"""The shipped configs are Stable Diffusion 2 base."""

import json
from functools import partialmethod
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shards.base.config import load_config
from shards.base.errors import RequestError
from tests.runs import UNET
from train.config import TrainConfig
from train.model.config import AdamWConfig
from train.model.network import build_network, compile_network, load_pretrained
from train.setup import microbatch_size

CONFIGS = Path(__file__).parents[3] / "configs"


def test_the_phases_are_as_designed() -> None:
    one, two = (load_config(TrainConfig, CONFIGS / f"phase{phase}.yaml", [], "train") for phase in (1, 2))
    assert [(c.max_steps, c.data.streams[0].bucket) for c in (one, two)] == [(550_000, "256x256"), (850_000, "512x512")]
    assert (one.ema.start_step, two.ema.start_step, two.ema.decay) == (None, 800_000, 0.9999)
    assert two.init_from == one.run_dir and one.init_from is None
    for config in (one, two):
        assert config.global_batch_size == 2048 and config.network.name == "sd2-base.json"
        optimizer, objective = config.optimizer, config.objective
        assert isinstance(optimizer, AdamWConfig)
        adamw = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "max_grad_norm": 1.0}
        assert adamw.items() <= optimizer.model_dump().items()
        assert (config.schedule.kind, config.schedule.warmup_steps) == ("constant", 10_000)
        noise: dict[str, object] = {"num_train_timesteps": 1000, "beta_start": 0.00085, "beta_end": 0.012}
        noise |= {"prediction": "epsilon", "beta_schedule": "scaled_linear", "caption_dropout": 0.1}
        assert noise.items() <= objective.model_dump().items()


def test_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    one = build_network(UNET, 0).state_dict()
    torch.manual_seed(2)
    two = build_network(UNET, 0).state_dict()
    other = build_network(UNET, 1).state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_sana_starts_with_small_text_states(tmp_path: Path) -> None:
    """SANA's own code scales its caption norm by 0.01 at the start, which diffusers' constructor does not know."""
    from diffusers import SanaTransformer2DModel

    sizes = {"num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 8, "caption_channels": 16}
    sizes |= {"num_cross_attention_heads": 2, "cross_attention_head_dim": 8, "cross_attention_dim": 16}
    (tmp_path / "sana.json").write_text(json.dumps({"_class_name": "SanaTransformer2DModel", **sizes}))
    network = build_network(tmp_path / "sana.json", 0)
    assert torch.equal(network.caption_norm.weight, torch.full((16,), 0.01))
    torch.manual_seed(0)
    for name, parameter in SanaTransformer2DModel(**sizes).named_parameters():
        assert name == "caption_norm.weight" or torch.equal(parameter, network.get_parameter(name))


def test_every_latent_shape_may_compile_a_graph() -> None:
    with torch._dynamo.config.patch(recompile_limit=8, accumulated_recompile_limit=8):
        compile_network(torch.nn.Identity(), num_shapes=20)
        limits = torch._dynamo.config.recompile_limit, torch._dynamo.config.accumulated_recompile_limit
    assert min(limits) > 20  # one more for validation


def test_a_hook_inside_one_of_several_equal_blocks_runs_when_they_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="eager"))
    linears = [nn.Linear(2, 2) for _ in range(3)]
    network = nn.ModuleDict({"blocks": nn.ModuleList(nn.Sequential(linear, nn.Tanh()) for linear in linears)})
    network.get_submodule("blocks.1.0").register_forward_hook(lambda module, inputs, output: -output)
    compile_network(network, num_shapes=1, by_block=True)
    ones = torch.ones(1, 2)
    found = [network.get_submodule(f"blocks.{number}")(ones) for number in range(3)]
    torch.compiler.reset()
    for output, linear, sign in zip(found, linears, (1, -1, 1), strict=True):
        torch.testing.assert_close(output, torch.tanh(sign * F.linear(ones, linear.weight, linear.bias)))


@pytest.mark.parametrize(("compiled", "expected"), [(False, 32), (True, 20)])
def test_a_compiled_step_fills_as_few_samples_as_possible(compiled: bool, expected: int) -> None:
    """40 samples per process take two microbatches, of 32 and 8 or of 20 each."""
    config = load_config(TrainConfig, CONFIGS / "phase1.yaml", [], "train")
    changed = config.model_copy(update={"global_batch_size": 2560, "microbatch_size": 32, "compile": compiled})
    assert microbatch_size(changed, 64) == expected


def test_dropout_is_refused(tmp_path: Path) -> None:
    fields = json.loads(UNET.read_text()) | {"dropout": 0.1}
    (tmp_path / "unet.json").write_text(json.dumps(fields))
    with pytest.raises(RequestError, match=r"sets dropout 0\.1"):
        build_network(tmp_path / "unet.json", 0)


@pytest.mark.parametrize(("variant", "most"), [(None, "10GB"), ("fp16", "10GB"), (None, "200KB")])
def test_a_pretrained_folder_is_loaded_as_float32(tmp_path: Path, variant: str | None, most: str) -> None:
    theirs = build_network(UNET, 1)
    if variant:
        theirs.half()
    theirs.save_pretrained(tmp_path, variant=variant, max_shard_size=most)
    assert most == "10GB" or len(list(tmp_path.glob("*.safetensors"))) > 1
    ours = build_network(UNET, 2)
    load_pretrained(ours, str(tmp_path))
    expected = theirs.float().state_dict()
    assert all(
        value.dtype == torch.float32 and value.equal(expected[name]) for name, value in ours.state_dict().items()
    )


@pytest.mark.parametrize("most", ["10GB", "200KB"])
def test_float32_weights_are_preferred_to_half_precision_ones(
    tmp_path: Path, most: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Float32 weights are loaded from one file or several; weights in half precision only with a message."""
    theirs = build_network(UNET, 1)
    theirs.save_pretrained(tmp_path, max_shard_size=most)
    build_network(UNET, 1).half().save_pretrained(tmp_path, variant="fp16")
    ours = build_network(UNET, 2)
    load_pretrained(ours, str(tmp_path))
    expected = theirs.state_dict()
    assert all(value.equal(expected[name]) for name, value in ours.state_dict().items())
    assert "half-precision" not in capsys.readouterr().out
    for path in tmp_path.glob("*.safetensors*"):
        if "fp16" not in path.name:
            path.unlink()
    load_pretrained(ours, str(tmp_path))
    assert not all(value.equal(expected[name]) for name, value in ours.state_dict().items())
    assert "has only half-precision weights" in capsys.readouterr().out


def test_a_transformer_for_another_sample_size_is_refused(tmp_path: Path) -> None:
    """PixArt's position embeddings depend on sample_size, which no weight's shape shows."""
    fields = {
        "_class_name": "PixArtTransformer2DModel",
        "attention_head_dim": 8,
        "caption_channels": 12,
        "cross_attention_dim": 16,
        "norm_num_groups": 8,
        "num_attention_heads": 2,
        "num_layers": 1,
        "sample_size": 32,
    }
    path = tmp_path / "backbone.json"
    path.write_text(json.dumps(fields))
    build_network(path, 1).save_pretrained(tmp_path / "theirs")
    load_pretrained(build_network(path, 2), str(tmp_path / "theirs"))
    path.write_text(json.dumps(fields | {"sample_size": 64}))
    with pytest.raises(RequestError, match=r"sample_size: 32 ≠ 64 \(pretrained ≠ config\)"):
        load_pretrained(build_network(path, 2), str(tmp_path / "theirs"))


def test_another_architecture_is_refused_by_its_fields(tmp_path: Path) -> None:
    build_network(UNET, 1).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    # one number equals a list that repeats it, and a U-Net's sample_size does not change its output
    path.write_text(json.dumps(fields | {"attention_head_dim": [4, 4], "sample_size": 99}))
    load_pretrained(build_network(UNET, 2), str(tmp_path))
    path.write_text(json.dumps(fields | {"cross_attention_dim": 32, "in_channels": 9}))
    with pytest.raises(
        RequestError, match=r"in_channels: 9 ≠ 4; .*cross_attention_dim: 32 ≠ 16 \(pretrained ≠ config\)"
    ):
        load_pretrained(build_network(UNET, 2), str(tmp_path))


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(UNET.read_text())
    with pytest.raises(RequestError, match=r"has no diffusion_pytorch_model\.safetensors or .*Other formats are not"):
        load_pretrained(build_network(UNET, 2), str(tmp_path))


@pytest.mark.parametrize("length", [0, 1000])
def test_pretrained_weights_cut_short_are_named(tmp_path: Path, length: int) -> None:
    unet = build_network(UNET, seed=0)
    unet.save_pretrained(tmp_path)
    path = tmp_path / "diffusion_pytorch_model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(RequestError, match=f"{path} is damaged"):
        load_pretrained(unet, str(tmp_path))
