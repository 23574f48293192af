"""Each family trained on projected text, and its export, which reads full-width text."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import load_file

from evaluation.sampling.pipeline import has_guidance_input
from shards.__main__ import run as shards
from shards.base.errors import RequestError
from shards.base.store import LocalStore
from shards.format.encoding import EncodingRecord
from tests.families.small import ALL_BUT_SD, TOKENS, Small
from tests.families.starting import GUIDANCE, begun, small_run, started
from tests.families.steps import check_steps, exported_case
from tests.runs import write_config
from train.__main__ import run as train
from train.config import TrainConfig
from train.export.pipeline import ExportConfig, write_pipeline
from train.model.inputs import Conditioning, TextConditioning
from train.model.network import build_network
from train.prepare import prepare
from train.run.reporting.json_lines import read_json_lines
from train.trainer import Trainer

pytestmark = pytest.mark.usefixtures("in_threads")

WIDTH = 7
FOLDED = {
    "sd2": r"attn2.to_k, attn2.to_v",
    "sd15": r"attn2.to_k, attn2.to_v",
    "sdxl": r"attn2.to_k, attn2.to_v",
    "pixart-sigma": "caption_projection.linear_1",
    "sd3": "context_embedder",
    "flux1": "context_embedder",
    "sana": "caption_projection.linear_1",
    "prx": "txt_in",
}
"""Layers whose weights change at export."""


def towers_of(made: Small) -> dict[str, Any]:
    """Return the towers with hidden states that the family's network reads."""
    return {name: tower for name, tower in record(made).texts.items() if tower.states}


def record(made: Small) -> EncodingRecord:
    return EncodingRecord.load(LocalStore(made.root))


def derive_projected(made: Small, width: int = WIDTH) -> Small:
    """Derive a root with projected states."""
    derived = replace(made, latents=f"projected-{width}")
    if not derived.root.exists():
        joint = ["--text.joint", "clip_l,clip_g", "t5"] if made.family.name == "sd3" else []
        widths = [f"{name}={width}" for name in towers_of(made)]
        options = ["--text.width", *widths, *joint]
        shards(["derive", str(made.root), str(derived.root), *options])
    return derived


@pytest.mark.parametrize("name", ALL_BUT_SD)
def test_the_exported_network_equals_the_trained_one(name: str, small: Callable[[str], Small]) -> None:
    """In the stock pipeline up to rounding, and with folded layers that are exact."""
    made = derive_projected(small(name))
    config, trainer = begun(made, "projected")
    folder = write_pipeline(config.work, ExportConfig(weights="raw"))
    check_folded_layers(name, made, config, trainer, folder)
    trained = trainer.train_step.network
    case = exported_case(made, config, trainer, folder, trained)
    assert case.unet is trained
    check_steps(case)
    check_card(name, folder)


def check_card(name: str, folder: Path) -> None:
    """Check the arguments with which the card's example calls the pipeline."""
    code = (folder / "README.md").read_text().split("```python\n")[1].split("```")[0]
    compile(code, "README.md", "exec")
    assert "height=64, width=64" in code
    assert (f"guidance_scale={GUIDANCE:g}," in code) == has_guidance_input(folder)
    assert ("true_cfg_scale=" in code) == has_guidance_input(folder)
    assert (f"max_sequence_length={TOKENS}," in code) == (name in ("flux1", "sd3", "pixart-sigma", "sana"))
    assert ("use_resolution_binning=False," in code) == (name in ("pixart-sigma", "sana", "prx"))
    assert ("clean_caption=False," in code) == (name in ("pixart-sigma", "sana"))


def check_folded_layers(name: str, made: Small, config: TrainConfig, trainer: Trainer, folder: Path) -> None:
    """Compare in float64 on random states; all other weights must be unchanged."""
    trained, texts, backbone = trainer.train_step.network, record(made).texts, trainer.train_step.loss.backbone
    path = folder / ("unet" if (folder / "unet").is_dir() else "transformer")
    folded: Any = type(trained).from_pretrained(path).double()
    before, after = trained.state_dict(), load_file(path / "diffusion_pytorch_model.safetensors")
    changed = sorted(
        {key for key in before if before[key].shape != after[key].shape or (before[key] != after[key]).any()}
    )
    layers = FOLDED[name].split(", ")
    assert changed and all(any(key.endswith(f"{layer}.weight") for layer in layers) for key in changed)
    assert {layer for layer in layers if any(key.endswith(f"{layer}.weight") for key in changed)} == set(layers)

    trained = type(trained).from_config(trained.config)
    trained.load_state_dict(before)
    trained = trained.double()
    generator = torch.Generator().manual_seed(0)
    whole, narrow = {}, {}
    for tower, stored in texts.items():
        pooled = torch.randn(2, stored.pooled, generator=generator).double() if stored.pooled else None
        mask = torch.ones(2, stored.length) if stored.hides_padding else None
        states = (
            torch.randn(2, stored.length, stored.input_width, generator=generator).double() if stored.states else None
        )
        whole[tower] = TextConditioning(states, mask, pooled)
        if states is not None and stored.projection is not None:
            states = states @ torch.tensor(stored.projection.array).double()
        narrow[tower] = TextConditioning(states, mask, pooled)
    unprojected = config.backbone.resolved({tower: stored.unprojected() for tower, stored in texts.items()})
    noisy = torch.randn(2, record(made).image.channels, 8, 8, generator=generator).double()
    times = torch.tensor([300.0, 800.0]).double()
    with torch.no_grad():
        sizes = torch.tensor([[64.0, 64, 0, 0]] * 2).double()
        expected = backbone.predict(trained, noisy, times, Conditioning(narrow, sizes, (64, 64)))
        found = unprojected.predict(folded, noisy, times, Conditioning(whole, sizes, (64, 64)))
    assert float((found - expected).abs().max()) < 1e-5 * float(expected.abs().max())


def test_sd3_needs_a_joint_projection(small: Callable[[str], Small]) -> None:
    made = small("sd3")
    apart = replace(made, latents="apart")
    shards(["derive", str(made.root), str(apart.root), "--text.width", "t5=7"])
    with pytest.raises(RequestError, match=r"must be projected jointly .`text\.joint: \[\['clip_l', 'clip_g'"):
        prepare(TrainConfig.model_validate(small_run(apart, "apart")))


def test_a_config_with_the_wrong_width_is_refused(small: Callable[[str], Small], tmp_path: Path) -> None:
    made = derive_projected(small("sd2"))
    fields = small_run(made, "wrong")
    config = json.loads(Path(fields["backbone"]["config"]).read_text()) | {"cross_attention_dim": WIDTH}
    (tmp_path / "unet.json").write_text(json.dumps(config))
    fields["backbone"]["config"] = str(tmp_path / "unet.json")
    message = rf"cross_attention_dim {WIDTH}, but must have the width of the text encoder\'s states, 16\."
    with pytest.raises(RequestError, match=message):
        prepare(TrainConfig.model_validate(fields))


def test_init_from_converts_weights_where_that_is_exact(small: Callable[[str], Small]) -> None:
    made = small("sd2")
    narrow, wide = derive_projected(made), derive_projected(made, 11)
    first, trainer = begun(narrow, "narrow")
    for target in (wide, made):
        fields = small_run(target, f"from-narrow-{target.latents}", data={"shuffle": False, "num_canonical_nodes": 1})
        prepared = prepare(
            TrainConfig.model_validate(fields | {"init_from": str(first.run_dir), "init_weights": "raw"})
        )
        states = torch.randn(2, 16, 16)
        predictions = []
        for network, root in ((trainer.train_step.network, narrow), (prepared.network, target)):
            projection = record(root).texts["text"].projection
            read = states if projection is None else states @ torch.tensor(projection.array).float()
            with torch.no_grad():
                predictions.append(network(torch.ones(2, 4, 8, 8), torch.tensor([5, 700]), read).sample)
        torch.testing.assert_close(*predictions, rtol=1e-4, atol=1e-5)
    second, _ = begun(wide, "wide")
    fields = small_run(narrow, "from-wide") | {"init_from": str(second.run_dir)}
    with pytest.raises(
        RequestError,
        match=r"on text projected onto 11 dimensions, but this run's data has text with",
    ):
        prepare(TrainConfig.model_validate(fields))
    with pytest.raises(RequestError, match=r"init_unet: the weights of .* read full-width text, but this run's data"):
        prepare(TrainConfig.model_validate(small_run(narrow, "from-unet") | {"init_unet": str(made.folder)}))
    whole, _ = begun(made, "whole")
    fields = small_run(narrow, "from-whole") | {"init_from": str(whole.run_dir)}
    with pytest.raises(RequestError, match=r"was trained on full-width text, but this run's data has text with a"):
        prepare(TrainConfig.model_validate(fields))


def test_text_that_passes_through_a_norm_is_refused(small: Callable[[str], Small]) -> None:
    """A U-Net's addition_embed_type `text` normalises the states before it reads them."""
    made = derive_projected(small("sd2"))
    fields = small_run(made, "normed")
    config = json.loads(Path(fields["backbone"]["config"]).read_text())
    config |= {"addition_embed_type": "text", "addition_embed_type_num_heads": 1}
    path = made.folder / "normed.json"
    path.write_text(json.dumps(config))
    fields["backbone"]["config"] = str(path)
    with pytest.raises(RequestError, match=r"reads text through .*add_embedding\.norm1.*, which cannot be converted"):
        prepare(TrainConfig.model_validate(fields))


def test_resuming_and_exports_keep_the_right_widths(small: Callable[[str], Small]) -> None:
    made = derive_projected(small("sd2"))
    config, trainer = begun(made, "resumed")
    again = started(config)
    assert again.state.step == 0 and again.train_step.network.config.cross_attention_dim == WIDTH
    resumed = again.train_step.network.state_dict()
    assert all(value.equal(resumed[key]) for key, value in trainer.train_step.network.state_dict().items())
    folder = write_pipeline(config.work, ExportConfig(weights="raw"))
    pipeline = diffusers.StableDiffusionPipeline.from_pretrained(folder)
    assert pipeline.unet.config.cross_attention_dim == 16
    card = (folder / "README.md").read_text()
    assert "in training, on text projected from 16 onto 7 dimensions; this export reads full-width text" in card
    file = write_pipeline(config.work, ExportConfig(weights="raw", format="single-file"))
    (key,) = [key for key in load_file(file) if key.endswith("input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight")]
    assert load_file(file)[key].shape[1] == 16


def test_a_root_whose_projection_has_changed_is_not_used_for_conversions(small: Callable[[str], Small]) -> None:
    """Neither to export a run, nor to start from one."""
    made = small("sd2")
    source = derive_projected(made)
    changing = replace(made, latents="changing")
    shutil.copytree(source.root, changing.root)
    config, _ = begun(changing, "changing-run")
    shutil.rmtree(changing.root)
    shards(["derive", str(made.root), str(changing.root), "--text.width", "9"])
    with pytest.raises(RequestError, match=r"has a different projection of the text than the one on which the run was"):
        write_pipeline(config.work, ExportConfig(weights="raw"))
    fields = small_run(changing, "from-changing") | {"init_from": str(config.run_dir)}
    with pytest.raises(RequestError, match=r"now has a different projection than the one on which the run was trained"):
        prepare(TrainConfig.model_validate(fields))


def test_a_config_may_rely_on_diffusers_default_width(small: Callable[[str], Small], tmp_path: Path) -> None:
    fields = json.loads((small("flux1").folder / "backbone.json").read_text())
    del fields["joint_attention_dim"]
    (tmp_path / "backbone.json").write_text(json.dumps(fields))
    assert build_network(tmp_path / "backbone.json", None, (4096, 7)).config.joint_attention_dim == 7


def test_validation_and_post_hoc_averages(small: Callable[[str], Small], tmp_path: Path) -> None:
    """A rebuilt average is exported with the original width."""
    made = derive_projected(small("sd2"))
    validation = {"root": str(made.root), "bucket": "64x64", "samples": 8, "batch_size": 8, "every": 2}
    changes = {"ema": {"snapshot_every": 2}, "checkpoint": {"every": 2}, "validation": validation}
    run = made.folder / "validated"
    fields = made.train_fields(run, max_steps=4, **changes)
    train(["--config", str(write_config(tmp_path, fields))])
    losses = [line["val_loss"] for line in read_json_lines(run / "metrics.jsonl") if "val_loss" in line]
    assert len(losses) >= 2 and all(map(math.isfinite, losses))
    train(["ema", str(run), "--std", "0.07"])
    (average,) = (run / "posthoc").glob("std-0.070-*")
    folder = write_pipeline(run, ExportConfig(weights=str(average), output=tmp_path / "export"))
    unet = diffusers.UNet2DConditionModel.from_pretrained(folder / "unet")
    assert unet.config.cross_attention_dim == 16

    fields["validation"]["root"] = str(small("sd2").root)
    fields["run_dir"] = str(made.folder / "other-validation")
    with pytest.raises(RequestError, match=r"texts\.text\.width: 7 ≠ 16; texts\.text\.projection\.matrix: SHA-256 "):
        prepare(TrainConfig.model_validate(fields))
