"""Single-file exports: diffusers' own converters and `from_single_file` restore the weights."""

import errno
import hashlib
import json
import resource
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from diffusers.loaders.single_file_utils import (
    convert_flux_transformer_checkpoint_to_diffusers,
    convert_ldm_unet_checkpoint,
    convert_ldm_vae_checkpoint,
    convert_sd3_transformer_checkpoint_to_diffusers,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoTokenizer, CLIPConfig, CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from examples.shapes.models import MODELS
from shards.base.errors import RequestError, WorkError
from shards.base.store import LocalStore
from shards.format.encoding import EncodingRecord
from shards.format.models import hash_weights
from tests.fixtures import encode_all, folder_of, precompute_config
from tests.runs import ONE_LEVEL_UNET, train_run
from train.__main__ import run as command
from train.export.pipeline import ExportConfig, write_pipeline
from train.export.single_file import (
    NETWORK,
    Component,
    check_class,
    check_scale,
    check_text_encoders,
    flux,
    is_single_file,
    layout_of,
    modelspec,
    sd3,
    single_file_weights,
    unet,
    vae,
    write_single_file,
)
from train.objective.config import ObjectiveConfig

DATE = datetime(2026, 11, 27, tzinfo=UTC)
SMALL_UNET: dict[str, Any] = {
    "block_out_channels": [32, 32, 64, 64],
    "attention_head_dim": 2,
    "norm_num_groups": 8,
    "sample_size": 8,
}
SIZES: dict[str, Any] = {"intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 1000}
VAE: dict[str, Any] = {
    "block_out_channels": [8, 8, 16, 16],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "layers_per_block": 2,
    "norm_num_groups": 4,
    "latent_channels": 4,
}


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def component(model: Any) -> Component:
    for parameter in model.parameters():  # some layers start from ones and zeros
        nn.init.normal_(parameter)
    return Component(dict(model.state_dict()), dict(model.config))


def check_same(found: dict[str, torch.Tensor], model: nn.Module) -> None:
    expected = model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", ["configs/unet/sd15.json", "configs/unet/sd2-base.json", "configs/sdxl/backbone.json"])
def test_diffusers_converts_a_unet_back(name: str) -> None:
    fields = json.loads(Path(name).read_text()) | SMALL_UNET
    if "sdxl" in name:
        fields |= {"block_out_channels": [32, 32, 64], "transformer_layers_per_block": [1, 2, 2]}
    network = UNet2DConditionModel.from_config(fields)
    original = {NETWORK + key: value for key, value in unet(component(network)).items()}
    check_same(convert_ldm_unet_checkpoint(original, network.config), network)


def test_diffusers_converts_a_vae_back() -> None:
    model = AutoencoderKL(**VAE)
    original = {f"first_stage_model.{key}": value for key, value in vae(component(model)).items()}
    assert original["first_stage_model.encoder.mid.attn_1.q.weight"].shape == (16, 16, 1, 1)
    check_same(convert_ldm_vae_checkpoint(original, model.config), model)


@pytest.mark.parametrize("extra", [{}, {"qk_norm": "rms_norm", "dual_attention_layers": (0,)}])
def test_diffusers_converts_sd3_back(extra: dict[str, Any]) -> None:
    network = SD3Transformer2DModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=24,
        caption_projection_dim=16,
        pooled_projection_dim=12,
        pos_embed_max_size=8,
        **extra,
    )
    check_same(convert_sd3_transformer_checkpoint_to_diffusers(sd3(component(network))), network)


def test_diffusers_converts_flux_back() -> None:
    """diffusers' converter fixes the width at FLUX.1's, but splits weights by rows alone, so a few columns suffice."""
    with torch.device("meta"):
        network: Any = FluxTransformer2DModel(num_layers=1, num_single_layers=1, guidance_embeds=True)
    weights = {key: torch.randn(value.shape[0], 3) for key, value in network.state_dict().items()}
    found = convert_flux_transformer_checkpoint_to_diffusers(flux(Component(dict(weights), dict(network.config))))
    assert found.keys() == weights.keys() and all(torch.equal(found[key], weights[key]) for key in weights)


def stable_diffusion(folder: Path, hidden_act: str) -> StableDiffusionPipeline:
    """Save a small Stable Diffusion, of version 1 (`quick_gelu`) or 2 (`gelu`)."""
    name = "sd15" if hidden_act == "quick_gelu" else "sd2-base"
    fields = json.loads(Path(f"configs/unet/{name}.json").read_text()) | SMALL_UNET
    text = CLIPTextConfig(hidden_size=16, hidden_act=hidden_act, **SIZES | {"num_hidden_layers": 23})
    pipeline = StableDiffusionPipeline(
        vae=AutoencoderKL(**VAE),
        text_encoder=CLIPTextModel(text),
        tokenizer=AutoTokenizer.from_pretrained(MODELS / "tokenizer"),
        unet=UNet2DConditionModel.from_config(fields),
        scheduler=DDIMScheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.save_pretrained(folder)
    return pipeline


@pytest.fixture(scope="module")
def version_2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small Stable Diffusion 2. Tests must not modify it."""
    folder = tmp_path_factory.mktemp("pipeline") / "folder"
    stable_diffusion(folder, "gelu")
    return folder


@pytest.mark.parametrize("hidden_act", ["quick_gelu", "gelu"])
def test_from_single_file_restores_stable_diffusion(hidden_act: str, tmp_path: Path) -> None:
    pipeline = stable_diffusion(tmp_path / "folder", hidden_act)
    fields = modelspec(tmp_path / "folder", "a title", "64x64", "v_prediction", DATE, "a description")
    write_single_file(tmp_path / "folder", tmp_path / "model.safetensors", fields, torch.float32)
    loaded = StableDiffusionPipeline.from_single_file(
        str(tmp_path / "model.safetensors"), config=str(tmp_path / "folder"), local_files_only=True, safety_checker=None
    )
    for name in ("unet", "vae", "text_encoder"):
        check_same(getattr(loaded, name).state_dict(), getattr(pipeline, name))
    keys = single_file_weights(tmp_path / "folder").keys()
    layer = "model.transformer.resblocks.22.ln_1.weight"  # by which ComfyUI recognises version 2
    assert (f"cond_stage_model.{layer}" in keys) == (hidden_act == "gelu")


def test_from_single_file_restores_sdxl(tmp_path: Path) -> None:
    fields = json.loads(Path("configs/sdxl/backbone.json").read_text()) | SMALL_UNET
    fields |= {"block_out_channels": [32, 32, 64], "transformer_layers_per_block": [1, 1, 1]}
    small, large = (
        CLIPTextConfig(hidden_size=16, hidden_act="quick_gelu", **SIZES),
        CLIPTextConfig(hidden_size=24, hidden_act="gelu", projection_dim=24, **SIZES),
    )
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "tokenizer")
    pipeline = StableDiffusionXLPipeline(
        vae=AutoencoderKL(**VAE),
        text_encoder=CLIPTextModel(small),
        text_encoder_2=CLIPTextModelWithProjection(large),
        tokenizer=tokenizer,
        tokenizer_2=tokenizer,
        unet=UNet2DConditionModel.from_config(fields),
        scheduler=DDIMScheduler(),
    )
    pipeline.save_pretrained(tmp_path / "folder")
    write_single_file(tmp_path / "folder", tmp_path / "model.safetensors", {}, torch.float32)
    loaded = StableDiffusionXLPipeline.from_single_file(
        str(tmp_path / "model.safetensors"), config=str(tmp_path / "folder"), local_files_only=True
    )
    for name in ("unet", "vae", "text_encoder", "text_encoder_2"):
        check_same(getattr(loaded, name).state_dict(), getattr(pipeline, name))


def test_the_header_has_modelspec_fields_and_the_hash_of_the_weights(version_2: Path, tmp_path: Path) -> None:
    fields = modelspec(version_2, "a title", "64x64", "v_prediction", DATE, "a description")
    path = tmp_path / "model.safetensors"
    write_single_file(version_2, path, fields, torch.float16)
    data = path.read_bytes()
    with safe_open(path, "pt") as file:
        found = file.metadata()
    assert found["modelspec.sai_model_spec"] == "1.0.0" and found["modelspec.prediction_type"] == "v"
    assert found["modelspec.architecture"] == "stable-diffusion-v2-512" and found["modelspec.title"] == "a title"
    start = 8 + int.from_bytes(data[:8], "little")
    assert found["modelspec.hash_sha256"] == "0x" + hashlib.sha256(data[start:]).hexdigest()
    assert {value.dtype for value in load_file(path).values()} == {torch.float16}

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: '\S+full\.safetensors'"):
            write_single_file(version_2, tmp_path / "full.safetensors", fields, torch.float16)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.fixture(scope="module")
def scaled_latents(models: Path, tars: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A latents root whose VAE has Stable Diffusion's scale. Tests must not modify it."""
    folder = tmp_path_factory.mktemp("scaled")
    shutil.copytree(models, folder / "models")
    change_json(folder / "models" / "vae" / "config.json", scaling_factor=0.18215)
    config = precompute_config(folder / "models", tars, folder / "latents", buckets=["64x64"])
    encode_all(config)
    return folder_of(config)


@pytest.fixture(scope="module")
def trained(scaled_latents: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_run(scaled_latents, tmp_path_factory.mktemp("trained") / "run", ONE_LEVEL_UNET, max_steps=2)


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A trained run that a test may export to."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def test_the_command_exports_a_run(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["export", str(run), "--format", "single-file"]
    for _ in range(2):  # the second export replaces the first
        capsys.readouterr()
        command(words)
        path = Path(capsys.readouterr().out.strip().splitlines()[-1])
        assert path == run / "export.safetensors"
    assert not list(run.glob(".export*"))
    folder = write_pipeline(run, ExportConfig())
    expected = single_file_weights(folder)
    found = load_file(path)
    assert found.keys() == expected.keys() and all(found[key].equal(value) for key, value in expected.items())
    with safe_open(path, "pt") as file:
        assert file.metadata()["modelspec.title"] == "run" and file.metadata()["modelspec.resolution"] == "64x64"

    for extra, said in (
        (["--output", str(tmp_path / "model.ckpt")], r"must be named \*\.safetensors"),
        (["--output", str(tmp_path / "folder.safetensors")], r"is a folder, but --format single-file writes a file"),
    ):
        (tmp_path / "folder.safetensors").mkdir(exist_ok=True)
        with pytest.raises(RequestError, match=said):
            command([*words, *extra])
    with pytest.raises(RequestError, match="dtype applies only to"):
        command(["export", str(run), "--dtype", "float16"])
    with pytest.raises(RequestError, match=r"cannot be written \(.*: Not a directory\)\. With --output, choose"):
        command(["export", str(run), "--output", str(path / "below" / "a" / "file")])


def test_a_vae_with_a_different_normalisation_is_refused(run: Path, scaled_latents: Path, tmp_path: Path) -> None:
    """Its content hash does not cover scale and shift, because training applies those of encoding.json."""
    source = Path(EncodingRecord.load(LocalStore(scaled_latents)).image.weights.name)
    folder = shutil.copytree(source, tmp_path / "vae")
    command(["export", str(run), "--vae", str(folder)])
    change_json(folder / "config.json", scaling_factor=0.9)
    with pytest.raises(
        RequestError, match=r"normalises latents with scale \(0\.9, .* was trained with scale \(0\.18215, .* --vae"
    ):
        command(["export", str(run), "--vae", str(folder)])


def test_an_export_may_be_a_link_and_a_full_disk_is_reported(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk").mkdir()
    (run / "export").symlink_to(tmp_path / "disk")
    for _ in range(2):
        command(["export", str(run)])
        assert (run / "export").is_symlink() and (tmp_path / "disk" / "model_index.json").is_file()

    def fail(source: str, path: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", source)

    monkeypatch.setattr("shutil.copyfile", fail)
    with pytest.raises(
        WorkError, match=r"of the export cannot be copied: \[Errno 28\] No space left on device: \S+\. Fix"
    ):
        command(["export", str(run), "--output", str(tmp_path / "new")])
    assert not (tmp_path / "new").exists() and not list(tmp_path.glob(".new*"))


def test_vaes_with_older_names(tmp_path: Path) -> None:
    """Stable Diffusion's own files name the layers of the attention differently from today's diffusers."""
    model = AutoencoderKL(**VAE)
    now = component(model)
    older = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    weights = {}
    for key, value in now.weights.items():
        for new, old in older.items():
            key = key.replace(f"attentions.0.{new}.", f"attentions.0.{old}.")
        weights[key] = value
    found, expected = vae(Component(weights, now.config)), vae(now)
    assert found.keys() == expected.keys() and all(found[key].equal(value) for key, value in expected.items())


def test_bytes_are_reproducible_and_sdxl_is_marked(version_2: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        fields = modelspec(version_2, "Größe", "64x64", "epsilon", DATE, "a description")
        write_single_file(version_2, tmp_path / name, fields, torch.float32)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert is_single_file(tmp_path / "a") and not is_single_file(version_2 / "model_index.json")
    scheduler = {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True}
    assert layout_of("StableDiffusionXLPipeline").marks(scheduler).keys() == {"v_pred", "ztsnr"}
    assert not layout_of("StableDiffusionXLPipeline").marks({"prediction_type": "epsilon"})


@pytest.mark.parametrize(
    ("name", "objective", "said"),
    [
        ("StableDiffusionPipeline", {"prediction": "flow_matching"}, "flow_matching, num_train_timesteps 1000, which"),
        (
            "StableDiffusionPipeline",
            {"prediction": "sample"},
            "trained with prediction sample, num_train_timesteps 1000",
        ),
        ("StableDiffusionXLPipeline", {"beta_end": 0.02}, r"beta_start 0\.00085, beta_end 0\.02, which a single file"),
        ("StableDiffusionXLPipeline", {"beta_schedule": "linear"}, "beta_schedule linear"),
        ("StableDiffusionPipeline", {"num_train_timesteps": 500}, "num_train_timesteps 500"),
        ("StableDiffusion3Pipeline", {}, "The transformer was trained with prediction epsilon, num_train_timesteps 1"),
        ("StableDiffusion3Pipeline", {"prediction": "v_prediction"}, "1111 assume prediction flow_matching with num_t"),
        ("FluxPipeline", {"prediction": "flow_matching", "num_train_timesteps": 500}, "num_train_timesteps 500, which"),
    ],
)
def test_objectives_that_a_single_file_does_not_contain_are_refused(
    name: str, objective: dict[str, Any], said: str
) -> None:
    with pytest.raises(RequestError, match=said):
        check_class(name, ObjectiveConfig.model_validate(objective))
    check_class("StableDiffusionPipeline", ObjectiveConfig(prediction="v_prediction", zero_terminal_snr=True))
    check_class("FluxPipeline", ObjectiveConfig(prediction="flow_matching"))


def with_encoding(run: Path, folder: Path, **changes: Any) -> None:
    """Let a run read a copy of its latents root in which fields of the `image` or `text` tower are changed."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    (stream,) = config["data"]["streams"]
    shutil.copytree(stream["root"], folder)
    fields = EncodingRecord.load(LocalStore(folder)).model_dump()
    fields["image"] |= changes.get("image", {})
    fields["texts"]["text"] |= changes.get("text", {})
    (folder / "encoding.json").write_bytes(EncodingRecord.model_validate(fields).sealed())
    stream["root"] = str(folder)
    (run / "config.yaml").write_text(yaml.safe_dump(config))


def test_the_scale_of_another_models_vae_is_refused(run: Path, tmp_path: Path) -> None:
    """SDXL's VAE has the same shapes as Stable Diffusion 2's, but a different scale."""
    with_encoding(run, tmp_path / "latents", image={"scale": [0.13025] * 4})
    said = r"with scale 0\.13025 and shift 0\.0, which .* assume scale 0\.18215 and shift 0\.0 for a StableDiffusionPi"
    with pytest.raises(RequestError, match=said):
        command(["export", str(run), "--format", "single-file"])


@pytest.mark.parametrize(
    ("name", "vae", "scale", "shift"),
    [
        ("StableDiffusionPipeline", "sdxl", 0.13025, 0.0),
        ("StableDiffusionXLPipeline", "sd2", 0.18215, 0.0),
        ("StableDiffusion3Pipeline", "flux1", 0.3611, 0.1159),
        ("FluxPipeline", "sd3", 1.5305, 0.0609),
    ],
)
def test_only_the_layouts_own_scale_is_accepted(name: str, vae: str, scale: float, shift: float) -> None:
    own = layout_of(name)
    check_scale(name, (own.scale,) * 4, (own.shift,) * 4)
    with pytest.raises(RequestError, match=rf"with scale {scale} and shift {shift}, .* Export it as a folder"):
        check_scale(name, (scale,) * 4, (shift,) * 4)
    with pytest.raises(RequestError, match=r"with scale \(0\.1, "):  # one channel differs
        check_scale(name, (0.1, *(own.scale,) * 3), (own.shift,) * 4)


ENCODERS = {
    "StableDiffusionPipeline": ["sd2"],
    "StableDiffusionXLPipeline": ["clip-l", "clip-bigg"],
    "StableDiffusion3Pipeline": ["clip-l", "clip-bigg"],
    "FluxPipeline": ["clip-l"],
}
"""Configs of each pipeline's CLIP text encoders in configs/text_encoder."""


def encoder(folder: Path, name: str, **changes: Any) -> Path:
    """Save a shipped text encoder's config, with changes."""
    fields = json.loads(Path(f"configs/text_encoder/{name}.json").read_text()) | changes
    CLIPTextConfig(**fields).save_pretrained(folder)
    return folder


def encoders(folder: Path, pipeline: str) -> dict[str, Path]:
    """Save the configs of a pipeline's shipped CLIP text encoders, and return their folders."""
    names = ("text_encoder", "text_encoder_2")
    return {key: encoder(folder / key, name) for key, name in zip(names, ENCODERS[pipeline], strict=False)}


@pytest.mark.parametrize("pipeline", ENCODERS)
def test_the_shipped_text_encoders_are_accepted(pipeline: str, tmp_path: Path) -> None:
    folders = encoders(tmp_path, pipeline)
    check_text_encoders(pipeline, folders)
    if pipeline == "StableDiffusionPipeline":
        check_text_encoders(pipeline, {"text_encoder": encoder(tmp_path / "sd15", "clip-l")})
        # user interfaces refuse to load other widths
        small = encoder(tmp_path / "small", "clip-l", hidden_size=96, hidden_act="gelu", num_hidden_layers=2)
        check_text_encoders(pipeline, {"text_encoder": small})


@pytest.mark.parametrize(
    ("pipeline", "name", "like", "changes"),
    [
        ("StableDiffusionPipeline", "text_encoder", "sd2", {"num_hidden_layers": 24}),  # all of OpenCLIP's ViT-H
        ("StableDiffusionPipeline", "text_encoder", "sd2", {"hidden_act": "quick_gelu"}),
        ("StableDiffusionPipeline", "text_encoder", "clip-l", {"hidden_act": "gelu"}),
        ("StableDiffusionPipeline", "text_encoder", "clip-bigg", {}),
        ("StableDiffusionXLPipeline", "text_encoder", "clip-l", {"num_hidden_layers": 11}),
        ("StableDiffusionXLPipeline", "text_encoder_2", "clip-l", {}),
        ("StableDiffusion3Pipeline", "text_encoder_2", "clip-bigg", {"hidden_act": "gelu_new"}),
        ("FluxPipeline", "text_encoder", "clip-l", {"hidden_act": "gelu"}),
    ],
)
def test_text_encoders_that_user_interfaces_do_not_assume_are_refused(
    pipeline: str, name: str, like: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    folders = encoders(tmp_path, pipeline) | {name: encoder(tmp_path / "other", like, **changes)}
    with pytest.raises(RequestError, match=rf"The {name} of {pipeline}, \S+other, has .* Export it as a folder"):
        check_text_encoders(pipeline, folders)


def test_the_command_checks_the_text_encoder(run: Path, tmp_path: Path) -> None:
    """A folder that holds a whole CLIP model contains OpenCLIP's 24 layers, and training reads the last."""
    text = CLIPTextConfig(
        hidden_size=1024, hidden_act="gelu", num_hidden_layers=1, intermediate_size=32, vocab_size=514
    )
    folder = tmp_path / "text_encoder"
    CLIPTextModel(text).save_pretrained(folder)
    CLIPConfig(text_config=text.to_dict() | {"num_hidden_layers": 24}).save_pretrained(folder)
    recorded = hash_weights(str(folder), folder).model_dump()
    with_encoding(run, tmp_path / "latents", text={"weights": recorded})
    with pytest.raises(RequestError, match=r"width 1024, activation gelu and 24 layers\. In .* ViT-H without its last"):
        command(["export", str(run), "--format", "single-file"])


def test_weights_that_float16_cannot_hold_are_refused(version_2: Path, tmp_path: Path) -> None:
    shutil.copytree(version_2, tmp_path / "folder")
    path = tmp_path / "folder" / "unet" / "diffusion_pytorch_model.safetensors"
    save_file(load_file(path) | {"conv_in.bias": torch.full((32,), 1e5)}, path)
    with pytest.raises(RequestError, match=r"unet: input_blocks\.0\.0\.bias has values that overflow"):
        write_single_file(tmp_path / "folder", tmp_path / "model.safetensors", {}, torch.float16)


def test_a_layout_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    for name in ("SanaPipeline", ["trimmed_pipeline", "TrimmedStableDiffusionPipeline"]):
        with pytest.raises(RequestError, match=r"cannot load (Sana|Trimmed)"):
            layout_of(name)
    network = UNet2DConditionModel.from_config(json.loads(Path("configs/unet/sd15.json").read_text()) | SMALL_UNET)
    odd = Component({**network.state_dict(), "controlnet.weight": torch.zeros(1)}, dict(network.config))
    with pytest.raises(RequestError, match=r"no place for the weight controlnet\.weight"):
        unet(odd)
