"""Exported pipelines use the noise schedule and the prompt encoding of training."""

import json
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from bench.kit.roots import encoding_record
from precompute.config import PrecomputeConfig
from shards.base.config import load_config
from shards.base.errors import RequestError
from shards.format.encoding import EncodingRecord
from tests.runs import train_run
from train.__main__ import run as command
from train.config import TrainConfig
from train.export.components import check_length, pipeline_texts, set_length
from train.export.pipeline import check_pipeline
from train.export.prompts import prompt_arguments
from train.export.scheduler import sampler, scheduler_of
from train.model.backbone import PipelineConfig
from train.objective.config import ObjectiveConfig
from train.objective.paths import noise_scheduler

CONFIGS = Path("configs")
FAMILIES = sorted(path.parent.name for path in CONFIGS.glob("*/phase1.yaml"))
FLOW = ObjectiveConfig(prediction="flow_matching", shift={"factor": 3.0})
LOG_LINEAR = ObjectiveConfig(prediction="flow_matching", shift={"kind": "log_linear"})
NO_INSTRUCTION: dict[str, Any] = {"complex_human_instruction": []}
ZERO_SNR = ObjectiveConfig(prediction="v_prediction", zero_terminal_snr=True)


def shipped(family: str, phase: int = 1, **pipeline: Any) -> TrainConfig:
    """Load a family's training config, with fields of its pipeline overridden."""
    config = load_config(TrainConfig, CONFIGS / family / f"phase{phase}.yaml", [], "train")
    changed = config.backbone.pipeline.model_copy(update=pipeline)
    return config.model_copy(update={"backbone": config.backbone.model_copy(update={"pipeline": changed})})


def encoded(family: str, **changes: Any) -> EncodingRecord:
    """Return the record of a root that was encoded by a family's stage 1, with fields of its text towers overridden.
    Those of CLIP always have 77 tokens."""
    stage1 = load_config(PrecomputeConfig, CONFIGS / family / "precompute.yaml", [], "precompute")
    record = encoding_record(77, 8)
    texts = {}
    for name, tower in stage1.texts.items():
        is_clip = "clip" in name or name == "text"
        max_tokens = 77 if is_clip else changes.get("max_tokens", tower.max_tokens or 0)
        max_tokens += 200 * tower.beyond_template
        fields: dict[str, Any] = {
            "class_name": "CLIPTextModel" if is_clip else "T5EncoderModel",
            "template": tower.template,
            "lower": tower.lower,
            "empty": tower.empty,
            "keep": tower.keep,
            "layer": tower.layer,
            "masked": tower.masked,
            "states": tower.states,
            "pooled": 8 * tower.pooled,
            "trim": bool(tower.trim),
        }
        found = record.texts["text"].model_copy(update=fields | changes | {"max_tokens": max_tokens})
        texts[name] = found.model_copy(update={"length": len(found.kept)})
    return record.model_copy(update={"texts": texts})


@pytest.mark.parametrize("phase", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_shipped_families_can_be_exported(family: str, phase: int) -> None:
    check_pipeline(shipped(family, phase), encoded(family))
    check_pipeline(shipped(family, phase, scheduler=None, scheduler_settings={}), encoded(family))


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("sdxl", {"trim": True}, "shows padding to the network, but captions for clip_l were encoded with `masked`"),
        ("sdxl", {"layer": "last"}, "uses layer -2, but captions for clip_l were encoded with layer last"),
        ("flux1", {"layer": -2}, "uses layer last, but captions for t5 were encoded with layer -2"),
        ("flux1", {"template": "a photo of {}"}, "adds no text to the prompt, but captions for t5 were encoded with"),
        ("sana", {"template": "{} in oil"}, "only before the prompt, but captions for gemma were .* '{} in oil', so"),
        ("flux1", {"lower": True}, "does not convert prompts to lower case, but captions for t5 were encoded with `lo"),
        ("prx", {"lower": False}, "converts prompts to lower case, but captions for t5gemma were encoded without"),
        ("flux1", {"keep": ((0, 64),)}, r"uses all tokens, but captions for t5 were encoded with keep \[\[0, 64\]\]"),
        ("sana", {"keep": ((0, 64),)}, "uses the first token and the last ones, but captions for gemma were encoded"),
        ("flux1", {"max_tokens": 600}, "accepts at most 512 tokens, but captions for t5 were encoded with 600 tokens"),
        ("flux1", {"empty": "nothing"}, "the empty prompt as its .*, but dropped captions for t5 .* 'nothing', so"),
        ("sana", {"empty": None}, "dropped captions for gemma were encoded as .Given a user prompt, generate an 'Enh"),
        ("sd3", {"masked": True}, "Set `masked` and `trim` of texts.clip_[lg] to false, and encode"),
        (
            "pixart-sigma",
            {"masked": False, "trim": False},
            "hides padding from the network, but captions for t5 were encoded without `masked`",
        ),
    ],
)
def test_captions_that_the_pipeline_encodes_differently_are_refused(
    family: str, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(RequestError, match=said):
        check_pipeline(shipped(family), encoded(family, **changes))


def test_texts_that_have_no_effect_are_not_refused() -> None:
    """Unused prompts for dropped captions, and the case of captions for CLIP, whose tokenizer ignores it."""
    config = shipped("flux1")
    objective = config.objective.model_copy(update={"caption_dropout": 0.0})
    check_pipeline(config.model_copy(update={"objective": objective}), encoded("flux1", empty="nothing"))
    check_pipeline(shipped("sdxl"), encoded("sdxl", empty="nothing"))  # its unconditional input is zeros
    check_pipeline(shipped("sdxl"), encoded("sdxl", lower=True))


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("flux1", {"max_tokens": 128}, {"max_sequence_length": 128}),
        ("sana", {"template": "draw\n{}"}, {"complex_human_instruction": ["draw\n"]}),
        ("sana", {"template": "{}", "keep": ((None, None),)}, {"max_sequence_length": 498} | NO_INSTRUCTION),
        *((family, {}, {}) for family in FAMILIES),
    ],
)
def test_the_pipelines_call_encodes_prompts_like_captions(
    family: str, changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    config, encoding = shipped(family), encoded(family, **changes)
    check_pipeline(config, encoding)
    assert prompt_arguments(config.backbone.pipeline, encoding.texts.values()) == expected


@pytest.mark.parametrize(
    ("family", "image", "said"),
    [
        ("pixart-sigma", {"shift": (0.1,) * 4}, "PixArtSigmaPipeline ignores shift_factor in the VAE's config"),
        ("sdxl", {"shift": (0.1,) * 4}, "StableDiffusionXLPipeline ignores shift_factor"),
        ("sana", {"shift": (0.1,) * 4}, "SanaPipeline ignores shift_factor"),
        ("flux1", {"scale": (1.0, 2.0, 1.0, 1.0)}, "FluxPipeline ignores latents_mean and latents_std"),
        ("sdxl", {"scale": (1.0, 2.0, 1.0, 1.0), "shift": (0.1, 0.0, 0.0, 0.0)}, None),
        *((family, {"shift": (0.1,) * 4}, None) for family in ("sd3", "flux1", "prx")),
    ],
)
def test_a_pipeline_must_undo_the_normalisation_of_latents(
    family: str, image: dict[str, Any], said: str | None
) -> None:
    encoding = encoded(family)
    encoding = encoding.model_copy(update={"image": encoding.image.model_copy(update=image)})
    if said is None:
        check_pipeline(shipped(family), encoding)
        return
    with pytest.raises(RequestError, match=said):
        check_pipeline(shipped(family), encoding)


@pytest.mark.parametrize(
    ("family", "pipeline", "said"),
    [
        ("flux1", {"scheduler": "DPMSolverMultistepScheduler"}, r"with a shift `mu`, it raises AssertionError\(\)"),
        ("flux1", {"scheduler": "FlowMatchHeunDiscreteScheduler"}, "with a shift `mu`, it raises TypeError"),
        ("prx", {"scheduler_settings": {"use_dynamic_shifting": True}}, "without a shift `mu`, it raises ValueError"),
        ("sana", {"scheduler_settings": {"prediction_type": "epsilon"}}, "does not support networks that were trained"),
        (
            "sdxl",
            {"scheduler_settings": {"prediction_type": "v_prediction"}},
            "does not support networks that were tra",
        ),
        ("sdxl", {"scheduler": "EDMEulerScheduler"}, "does not support networks that were trained with prediction eps"),
        ("sdxl", {"scheduler_settings": {"beta_schedule": "x"}}, "cannot be built with the settings"),
        ("sana", {"scheduler": "EulerDiscreteScheduler"}, "does not support networks that were trained with predictio"),
        ("sdxl", {"scheduler": "FlowMatchEulerDiscreteScheduler"}, "prediction epsilon and .* such as DDIMScheduler"),
        (
            "sdxl",
            {"scheduler": "DDIMScheduler", "scheduler_settings": {"etta": 1}},
            "cannot be built with the settings",
        ),
    ],
)
def test_schedulers_that_cannot_sample_are_refused(family: str, pipeline: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        check_pipeline(shipped(family, **{"scheduler_settings": {}} | pipeline), encoded(family))


def test_a_unet_trained_with_flow_matching_needs_a_scheduler_that_scales_its_input() -> None:
    config = shipped("sd2", scheduler="FlowMatchEulerDiscreteScheduler").model_copy(update={"objective": FLOW})
    with pytest.raises(RequestError, match="has no attribute 'scale_model_input'"):
        check_pipeline(config, encoded("sd2"))


def test_a_scheduler_must_not_scale_the_input_of_a_pipeline_that_does_not() -> None:
    config = shipped("sana", scheduler="EulerDiscreteScheduler", scheduler_settings={})
    config = config.model_copy(update={"objective": ObjectiveConfig()})
    with pytest.raises(RequestError, match="it scales the network's input, which the pipeline does not do"):
        check_pipeline(config, encoded("sana"))


def test_a_pipeline_that_computes_a_shift_needs_flow_matching() -> None:
    config = shipped("flux1", scheduler=None).model_copy(update={"objective": ObjectiveConfig()})
    with pytest.raises(RequestError, match=r"it raises .* Choose a different objective\.prediction"):
        check_pipeline(config, encoded("flux1"))


@pytest.mark.parametrize(
    "name",
    [
        "DDIMScheduler",
        "DDPMScheduler",
        "DPMSolverMultistepScheduler",
        "EulerDiscreteScheduler",
        "UniPCMultistepScheduler",
    ],
)
@pytest.mark.parametrize(
    "objective",
    [
        ObjectiveConfig(),
        ObjectiveConfig(prediction="v_prediction", beta_schedule="linear", num_train_timesteps=500),
        ZERO_SNR,
    ],
)
def test_named_schedulers_have_the_noise_schedule_of_training(name: str, objective: ObjectiveConfig) -> None:
    found, trained = scheduler_of(PipelineConfig(scheduler=name), objective), noise_scheduler(objective)
    assert type(found).__name__ == name and found.config.prediction_type == objective.prediction
    # some of these replace the last step's 0 by a small number
    torch.testing.assert_close(found.alphas_cumprod, trained.alphas_cumprod, rtol=1e-6, atol=1e-7)
    assert found.config.clip_sample is False  # also for samplers that evaluation builds from this config
    if objective is ZERO_SNR:
        assert found.config.timestep_spacing == "trailing"


@pytest.mark.parametrize("num_steps", [2, 20, 21])
def test_a_schedule_with_few_steps_can_be_exported(num_steps: int) -> None:
    changes = {"objective": ObjectiveConfig(num_train_timesteps=num_steps)}
    check_pipeline(shipped("sd2").model_copy(update=changes), encoded("sd2"))


def test_a_pipeline_that_takes_other_networks_is_refused(latents: Path, tmp_path: Path) -> None:
    config = shipped("sdxl")
    backbone = config.backbone.model_copy(update={"config": shipped("sd3").network})
    with pytest.raises(RequestError, match="a network of class UNet2DConditionModel, but this run's network is of cla"):
        check_pipeline(config.model_copy(update={"backbone": backbone}), encoded("sdxl"))
    train_run(latents, tmp_path / "run", max_steps=1)  # the default pipeline is checked only at export
    with pytest.raises(RequestError, match=r"this run's network is of class PixArt.* Name a matching pipeline"):
        command(["export", str(tmp_path / "run")])
    assert not (tmp_path / "run" / "export").exists()


def test_a_schedule_that_a_scheduler_cannot_rescale_is_refused() -> None:
    check_pipeline(shipped("sdxl", scheduler="PNDMScheduler"), encoded("sdxl"))
    with pytest.raises(RequestError, match="prediction v_prediction and zero_terminal_snr and this noise schedule"):
        scheduler_of(PipelineConfig(scheduler="PNDMScheduler"), ZERO_SNR)


@pytest.mark.parametrize("name", ["UniPCMultistepScheduler", "DPMSolverSinglestepScheduler"])
def test_named_schedulers_sample_by_flow_matching_with_the_shift_of_training(name: str) -> None:
    pipeline = PipelineConfig(scheduler=name)
    found = scheduler_of(pipeline, LOG_LINEAR, (128, 96)).config
    assert found.use_flow_sigmas and found.prediction_type == "flow_prediction"
    assert found.flow_shift == LOG_LINEAR.shift.alpha((128, 96))
    chosen = pipeline.model_copy(update={"scheduler_settings": {"flow_shift": 2.0, "num_train_timesteps": 100}})
    assert scheduler_of(chosen, FLOW).config.flow_shift == 2.0
    assert scheduler_of(chosen, FLOW).config.num_train_timesteps == 100


@pytest.mark.parametrize(
    ("family", "scheduler", "is_dynamic"),
    [
        ("flux1", None, True),
        ("sd3", None, True),
        ("sd3", "FlowMatchHeunDiscreteScheduler", False),
        ("prx", "FlowMatchEulerDiscreteScheduler", False),
        ("sana", "FlowMatchEulerDiscreteScheduler", False),
    ],
)
def test_only_pipelines_that_compute_a_shift_get_a_dynamic_one(
    family: str, scheduler: str | None, is_dynamic: bool
) -> None:
    config = shipped(family, scheduler=scheduler, scheduler_settings={}).model_copy(update={"objective": LOG_LINEAR})
    check_pipeline(config, encoded(family))
    found = scheduler_of(config.backbone.pipeline, LOG_LINEAR, (32, 64))
    assert type(found).__name__ == (scheduler or "FlowMatchEulerDiscreteScheduler")
    assert found.config.get("use_dynamic_shifting", False) == is_dynamic
    assert is_dynamic or found.config.shift == LOG_LINEAR.shift.alpha((32, 64))


def test_the_default_scheduler_of_a_unet_is_the_sampler() -> None:
    for objective in (ObjectiveConfig(), ZERO_SNR, FLOW):
        found, expected = scheduler_of(PipelineConfig(), objective), sampler(objective)
        assert type(found) is type(expected)
        assert {**found.config, "_use_default_values": 0} == {**expected.config, "_use_default_values": 0}
    settings = {"timestep_spacing": "trailing"}
    found = scheduler_of(PipelineConfig(scheduler_settings=settings), ObjectiveConfig())
    assert isinstance(found, diffusers.DDIMScheduler) and found.config.timestep_spacing == "trailing"


@pytest.mark.parametrize("changes", [{"empty": "a photo"}, {"template": "draw: {}"}])
def test_the_stock_pipelines_unconditional_prompt_is_empty(changes: dict[str, Any]) -> None:
    config = shipped("sd2")
    pipeline_texts(encoding_record(16, 16, empty=""), config)
    with pytest.raises(RequestError, match=r"StableDiffusionPipeline uses .* Name a matching pipeline"):
        pipeline_texts(encoding_record(16, 16, **changes), config)
    if "empty" in changes:  # which is not used without caption dropout
        objective = config.objective.model_copy(update={"caption_dropout": 0.0})
        pipeline_texts(encoding_record(16, 16, **changes), config.model_copy(update={"objective": objective}))


def test_the_tokenizer_pads_prompts_like_the_captions(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({"model_max_length": 77, "unk_token": "a"}))
    set_length(tmp_path, 77)
    check_length(tmp_path, 77)
    assert path.read_text() == json.dumps({"model_max_length": 77, "unk_token": "a"})  # unchanged
    with pytest.raises(
        RequestError, match="to the text encoder's 77 tokens, but captions were encoded with max_tokens 40"
    ):
        check_length(tmp_path, 40)
    set_length(tmp_path, 40)
    assert json.loads(path.read_text()) == {"model_max_length": 40, "unk_token": "a"}
