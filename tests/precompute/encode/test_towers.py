"""Arbitrary frozen encoders: each tower stores what transformers and diffusers compute, with the same guarantees."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from diffusers import AutoencoderDC
from pydantic import ValidationError
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import (
    AutoTokenizer,
    CLIPConfig,
    CLIPModel,
    CLIPTextModelWithProjection,
    Dinov2Config,
    Dinov2Model,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    DINOv3ViTConfig,
    DINOv3ViTModel,
    Gemma2Model,
    IJepaConfig,
    IJepaModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    SiglipVisionConfig,
    SiglipVisionModel,
    SwinConfig,
    SwinModel,
    T5EncoderModel,
    ViTConfig,
    ViTForImageClassification,
    ViTMAEConfig,
    ViTMAEModel,
    ViTModel,
)

from precompute.config import describe_encoding
from precompute.describe import FeatureTowerConfig, TextConfig, TextTowerConfig, describe_features, describe_text
from precompute.encode.encoders import FeatureEncoder
from precompute.encode.networks import DeviceSettings, Network
from precompute.encode.towers import Towers
from shards.base.errors import RequestError
from shards.format.buckets import Bucket
from shards.format.encoding import EncodingRecord
from shards.format.towers import FeatureTower, TextTower
from shards.open import open_store
from shards.root.committed import load_receipts
from shards.root.reading import captions, read_part, text_latents
from shards.root.shared import load_uncond
from shards.tools.verify import verify_root
from tests.fixtures import encode_all, folder_of
from tests.fixtures import make_towers as towers_of
from tests.runs import UNET, train_fields
from tests.tiny_towers import BUCKET, PATCH, T5_LENGTH, T5_WIDTH, character_tokenizer, config_of, texts
from train.__main__ import run as train
from train.config import TrainConfig
from train.data.draws import global_slots
from train.data.loader import Loader
from train.data.spec import column_lengths
from train.data.streams import open_data
from train.model.network import build_network
from train.objective.config import ObjectiveConfig
from train.prepare import prepare
from train.run.fingerprint import check_resume, make_fingerprint
from train.run.reporting.json_lines import read_json_lines


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, models: Path, tars: Path, towers: Path) -> Path:
    """A root with two text towers and a feature tower."""
    config = config_of(models, tars, tmp_path_factory.mktemp("roots") / "root", towers)
    encode_all(config)
    return folder_of(config)


def samples_of(root: Path) -> list[dict[str, Any]]:
    return list(read_part(next((root / BUCKET).glob("00000*"))))


@functools.cache
def load(kind: Any, folder: Path) -> Any:
    return kind.from_pretrained(folder)


@torch.no_grad()
def clip_reference(towers: Path, models: Path, caption: str) -> tuple[Tensor, Tensor]:
    """Compute what StableDiffusionXLPipeline.encode_prompt uses: the second-to-last layer, and the projection."""
    ids = load(AutoTokenizer, models / "tokenizer")(
        caption, padding="max_length", max_length=16, truncation=True, return_tensors="pt"
    ).input_ids
    outputs = load(CLIPTextModelWithProjection, towers / "clip")(ids, output_hidden_states=True)
    return outputs.hidden_states[-2][0], outputs[0][0]


@torch.no_grad()
def t5_reference(towers: Path, caption: str) -> tuple[Tensor, int]:
    """Compute what PixArtSigmaPipeline.encode_prompt uses, and the number of real tokens."""
    inputs = load(AutoTokenizer, towers / "t5_tokenizer")(
        caption, padding="max_length", max_length=T5_LENGTH, truncation=True, return_tensors="pt"
    )
    model = load(T5EncoderModel, towers / "t5")
    states = model(inputs.input_ids, attention_mask=inputs.attention_mask).last_hidden_state
    return states[0], int(inputs.attention_mask.sum())


def close(found: Any, expected: Tensor) -> None:
    found = found if torch.is_tensor(found) else torch.tensor(found)
    torch.testing.assert_close(found.float(), expected.float(), rtol=2e-3, atol=2e-3)


def test_stored_latents_equal_those_of_the_pipelines(root: Path, towers: Path, models: Path) -> None:
    encoding = EncodingRecord.load(open_store(root))
    assert encoding.schema_version == 2 and encoding.texts["clip"].pooled == 10
    for sample in samples_of(root)[:4]:
        (caption,), (latents,) = captions(sample, encoding), text_latents(sample, encoding)
        states, pooled = clip_reference(towers, models, caption)
        close(latents["clip"], states)
        close(sample["pooled.clip"], pooled)
        states, num_tokens = t5_reference(towers, caption)
        close(latents["t5"], states)
        assert sample["num_tokens.t5"].tolist() == [num_tokens] and "num_tokens.clip" not in sample
    empty = load_uncond(open_store(root))
    assert empty["clip"].pooled is not None and empty["t5"].states is not None
    close(empty["clip"].pooled, clip_reference(towers, models, "")[1])
    close(empty["t5"].states, t5_reference(towers, "")[0])
    assert empty["t5"].num_tokens == 1
    assert list(verify_root(open_store(root))) == []


IMAGENET, CLIPS, HALF = (
    ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
)


def clip_in_two_halves() -> CLIPModel:
    text = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    return CLIPModel(CLIPConfig(text_config=text | {"vocab_size": 32}, vision_config=VISION, projection_dim=4))


VISION = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
VISION |= {"image_size": 32, "patch_size": 16}
DINO2 = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_ratio": 2}
DINO2 |= {"image_size": 56, "patch_size": PATCH}


@pytest.fixture(scope="module")
def seeing(models: Path, tars: Path, towers: Path, tmp_path_factory: pytest.TempPathFactory) -> Towers:
    """Towers whose feature tower, `eyes`, takes batches of three images. Tests replace its network."""
    features = {"eyes": {"model": str(towers / "dino"), "batch_size": 3}}
    return towers_of(config_of(models, tars, tmp_path_factory.mktemp("seeing") / "root", towers, features=features))


def vision_tower(model: PreTrainedModel, folder: Path, class_name: str | None) -> FeatureTower:
    """Save the model, and describe it as the feature tower `eyes`."""
    model.save_pretrained(folder)
    asked = FeatureTowerConfig(model=str(folder), class_name=class_name)
    return describe_features("eyes", asked, [Bucket.parse(BUCKET)])


@pytest.mark.parametrize(
    ("made", "class_name", "others", "means"),
    [
        (lambda: Dinov2Model(Dinov2Config(**DINO2)), None, 1, IMAGENET),
        (lambda: Dinov2WithRegistersModel(Dinov2WithRegistersConfig(**DINO2)), None, 5, IMAGENET),
        (lambda: DINOv3ViTModel(DINOv3ViTConfig(**VISION, num_register_tokens=4)), None, 5, IMAGENET),
        (lambda: ViTModel(ViTConfig(**VISION)), None, 1, HALF),
        (clip_in_two_halves, "CLIPVisionModel", 1, CLIPS),
        (lambda: SiglipVisionModel(SiglipVisionConfig(**VISION)), None, 0, HALF),
        (lambda: IJepaModel(IJepaConfig(**VISION)), None, 0, IMAGENET),
    ],
    ids=["dinov2", "dinov2 with registers", "dinov3", "vit", "clip", "siglip", "i-jepa"],
)
def test_features_equal_the_vision_models_outputs(
    made: Callable[[], PreTrainedModel],
    class_name: str | None,
    others: int,
    means: tuple[tuple[float, ...], tuple[float, ...]],
    tmp_path: Path,
    seeing: Towers,
) -> None:
    """64 × 48 px become a grid of 4 × 3. Batches are of three images, and two of them overlap."""
    torch.manual_seed(3)
    whole = made().eval()
    if means != IMAGENET:
        given = {"image_mean": means[0], "image_std": means[1]}
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(given))
    tower = vision_tower(whole, tmp_path, class_name)
    config = tmp_path / "config.json"  # of which encoding.json ignores the data type
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "bfloat16"}))
    eyes, sizes = FeatureEncoder(tmp_path, tower, DeviceSettings(torch.device("cpu"), "float32")), list[int]()
    seeing.features["eyes"] = eyes
    pictures = list(np.random.default_rng(0).integers(0, 256, (8, 48, 64, 3), np.uint8))
    start = eyes.start_batch
    eyes.start_batch = lambda pixels, count: sizes.append(len(pixels)) or start(pixels, count)  # type: ignore
    found = [latents.features["eyes"] for latents in seeing.start_pictures(Bucket(64, 48), pictures)()]
    assert sizes == [3, 3, 3]
    model, patch = getattr(whole, "vision_model", whole), eyes.tower.patch
    mean, std = (torch.tensor(of)[:, None, None] for of in means)
    options = {"interpolate_pos_encoding": True} if "dino" not in type(whole).__name__.lower() else {}
    for pixels, features in zip(pictures, found, strict=True):
        picture = torch.tensor(pixels).permute(2, 0, 1)[None].double() / 255
        scaled = F.interpolate(picture, (3 * patch, 4 * patch), mode="bicubic", antialias=True).clamp(0, 1)
        with torch.no_grad():
            states = model(((scaled - mean) / std).float(), **options).last_hidden_state[0]
        assert len(states) == others + 12 and features.shape == (12, 16)
        close(features, states[others:])


@pytest.mark.parametrize(
    ("made", "class_name", "words"),
    [
        (lambda: ViTMAEModel(ViTMAEConfig(**VISION)), None, r"\(16 patches\), ViTMAEModel .* returns 5 tokens of 16 "),
        (lambda: SwinModel(SwinConfig(embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=2)), None, "Swin"),
        (lambda: ViTForImageClassification(ViTConfig(**VISION)), None, "returns no hidden states.*last_hidden_state"),
        (clip_in_two_halves, None, "CLIPModel .* returns no hidden states"),
        (clip_in_two_halves, "ViTModel", "ViTModel in"),
    ],
    ids=["leaves patches out", "merges patches", "with a head", "of pictures and words", "another class"],
)
def test_vision_models_without_one_token_per_patch_are_refused(
    made: Callable[[], PreTrainedModel],
    class_name: str | None,
    words: str,
    tmp_path: Path,
) -> None:
    """Before anything is loaded, and with the name of a suitable one."""
    with pytest.raises(RequestError, match=f"features.eyes: .*{words}.*such as Dinov2Model"):
        vision_tower(made(), tmp_path, class_name)


def test_a_vision_model_whose_forward_reads_values_is_accepted(
    models: Path, tars: Path, tmp_path: Path, towers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model without weights has no values to read."""
    asked, forward = [], Dinov2Model.forward

    def look(self: Dinov2Model, pixels: Tensor, **options: Any) -> Any:
        asked.append(pixels.device.type)
        float(pixels.max())
        return forward(self, pixels, **options)

    monkeypatch.setattr(Dinov2Model, "forward", look)
    encoding = describe_encoding(config_of(models, tars, tmp_path / "root", towers))
    assert asked == ["meta"] and encoding.features["dino"].class_name == "Dinov2Model"


def test_receipts_record_the_seconds_of_each_tower(root: Path) -> None:
    for receipt in load_receipts(open_store(root)):
        towers = {"image", "texts.clip", "texts.t5", "features.dino"}
        of = {stage.removeprefix("device."): spent for stage, spent in receipt.seconds.items() if "device." in stage}
        assert of.keys() == towers and all(spent > 0 for spent in of.values())
        assert receipt.seconds["device"] == pytest.approx(sum(of.values()), abs=0.003)  # of values in milliseconds


def test_several_captions_and_several_towers(models: Path, tars: Path, tmp_path: Path, towers: Path) -> None:
    text = {"storage": "float8", "trim": True}
    config = config_of(models, tars, tmp_path / "root", towers, captions=["txt", "json:url"], text=text)
    encode_all(config)
    encoding = EncodingRecord.load(open_store(config.output))
    for sample in samples_of(folder_of(config))[:3]:
        found = captions(sample, encoding)
        assert len(found) == 2 and found[1].startswith("http://")
        for caption, latents in zip(found, text_latents(sample, encoding), strict=True):
            for name, (states, num_tokens) in {
                "clip": (clip_reference(towers, models, caption)[0], min(len(caption) + 2, 16)),
                "t5": t5_reference(towers, caption),
            }.items():
                kept = states[:num_tokens]
                assert latents[name].shape == kept.shape
                assert (torch.tensor(latents[name]) - kept).norm() / kept.norm() < 0.07
        assert sample["pooled.clip"].shape == (2, 10)
    assert list(verify_root(open_store(config.output))) == []


def test_a_template_and_the_tokens_that_are_kept(models: Path, tars: Path, tmp_path: Path, towers: Path) -> None:
    """As in SanaPipeline: an instruction precedes the caption; its first token and the last ones are kept."""
    instruction, length = "say more of: ", 20
    gemma = {
        "model": str(towers / "gemma"),
        "tokenizer": str(towers / "gemma_tokenizer"),
        "max_tokens": len(instruction) + length - 1,
        "masked": True,
        "template": instruction + "{}",
        "keep": [[0, 1], [-(length - 1), None]],
    }
    loaded = towers_of(config_of(models, tars, tmp_path / "root", towers, texts={"gemma": gemma}, features={}))
    tokenizer = AutoTokenizer.from_pretrained(towers / "gemma_tokenizer")
    tokenizer.padding_side = "right"
    model = Gemma2Model.from_pretrained(towers / "gemma").eval()
    captions = ["a", "a picture", "a picture of blobs"]
    for caption, (latents, _) in zip(captions, loaded.start_captions(captions)(), strict=True):
        inputs = tokenizer(
            instruction + caption,
            padding="max_length",
            max_length=len(instruction) + length - 1,
            truncation=True,
            return_tensors="pt",
        )
        index = [0, *range(-length + 1, 0)]
        with torch.no_grad():
            states = model(inputs.input_ids, attention_mask=inputs.attention_mask).last_hidden_state[0, index]
        num_tokens, found = int(inputs.attention_mask[0, index].sum()), latents["gemma"]
        assert found.states is not None and found.num_tokens == num_tokens
        close(found.states[:num_tokens], states[:num_tokens])


def test_an_autoencoder_without_a_posterior(models: Path, tars: Path, tmp_path: Path, towers: Path) -> None:
    vae = str(towers / "dc_ae")
    config = config_of(models, tars, tmp_path / "root", towers, vae=vae, features={})
    encode_all(config)
    encoding = EncodingRecord.load(open_store(config.output))
    image = encoding.image
    assert (image.class_name, image.posterior, image.channels, image.downsampling) == (
        "AutoencoderDC",
        "deterministic",
        4,
        4,
    )
    assert image.scale == (0.41,) * 4 and samples_of(folder_of(config))[0]["image_latents"].shape == (4, 16, 16)
    pixels = np.random.default_rng(0).integers(0, 256, (2, 64, 64, 3), np.uint8)
    with torch.no_grad():
        expected = AutoencoderDC.from_pretrained(vae).encode(
            torch.tensor(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1
        )
    close(towers_of(config).image(list(pixels), 4), expected.latent)
    with pytest.raises(RequestError, match="AutoencoderDC has no posterior"):
        describe_encoding(config_of(models, tars, tmp_path / "root", towers, vae=vae, posterior="moments"))


def test_an_overflow_in_any_result_of_a_tower_is_encoded_again(
    models: Path, tars: Path, tmp_path: Path, towers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, again = Network._run, []

    def overflow(self: Network, inputs: list[Tensor], precision: str) -> tuple[Tensor, ...]:
        results = run(self, inputs, precision)  # type: ignore[arg-type]
        if precision == "float16" and len(results) == 2:
            results[1][1] = 1e6  # only the pooled output
        elif precision == "float32":
            again.append(len(inputs[0]))
        return results

    monkeypatch.setattr(Network, "_run", overflow)
    found = towers_of(config_of(models, tars, tmp_path, towers, precision="float16")).texts["clip"](["a", "b"], 4)
    assert again == [4]
    states, pooled = clip_reference(towers, models, "b")
    assert found[1].latents.states is not None and found[1].latents.pooled is not None
    close(found[1].latents.states, states)
    close(found[1].latents.pooled, pooled)


def test_a_tokenizer_that_has_only_a_sentencepiece_model_is_loaded(tmp_path: Path, towers: Path) -> None:
    """PixArt's T5 tokenizer has no tokenizer.json, so transformers builds it from spiece.model."""
    from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

    with (tmp_path / "spiece.model").open("wb") as file:
        SentencePieceTrainer.train(
            sentence_iterator=iter(["a red square on a blue table", "two dogs and a cat"] * 20),
            model_writer=file,
            vocab_size=30,
            hard_vocab_limit=False,
            pad_id=0,
            eos_id=1,
            unk_id=2,
            bos_id=-1,
            minloglevel=2,
        )
    tokens = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    fields = {"tokenizer_class": "T5Tokenizer", "extra_ids": 0, "model_max_length": T5_LENGTH, **tokens}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
    describe_t5(towers, tokenizer=str(tmp_path))
    expected = SentencePieceProcessor(model_file=str(tmp_path / "spiece.model")).encode("a red cat")
    assert AutoTokenizer.from_pretrained(tmp_path)("a red cat").input_ids == [*expected, 1]


def describe_t5(towers: Path, **changes: Any) -> TextTower:
    asked = texts(towers, towers, **changes)["t5"]  # the second folder is for CLIP's tokenizer
    return describe_text("t5", TextTowerConfig.model_validate(asked), TextConfig())


def test_a_tokenizer_that_does_not_fit_the_text_encoder_is_refused(tmp_path: Path, towers: Path) -> None:
    """It is refused before a worker loads it: on a GPU, a token id beyond the embedding kills the process."""

    def refused(tokenizer: PreTrainedTokenizerFast) -> str:
        tokenizer.save_pretrained(tmp_path)
        with pytest.raises(RequestError) as raised:
            describe_t5(towers, tokenizer=str(tmp_path))
        return str(raised.value)

    further = character_tokenizer("t5")
    further.add_tokens([f"<picture {number}>" for number in range(30)])
    assert len(further) > 64
    further.save_pretrained(tmp_path)
    describe_t5(towers, tokenizer=str(tmp_path))
    unpadded = character_tokenizer("t5")
    unpadded.pad_token = None
    assert "defines no pad_token, which is needed to pad captions" in refused(unpadded)
    further.pad_token = "<picture 29>"
    assert f"has {len(further)} tokens, but the text encoder has only 64 embeddings. Use the tokenizer" in refused(
        further
    )
    vocabulary = {f"{number}": number for number in range(65)}
    large = Tokenizer(WordLevel(vocabulary, "0"))
    assert "has 65 tokens, but" in refused(PreTrainedTokenizerFast(tokenizer_object=large, pad_token="1"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(RequestError, match=rf"texts\.t5\.tokenizer: transformers cannot load .*{tmp_path}: "):
        describe_t5(towers, tokenizer=str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text('{"model_max')
    with pytest.raises(RequestError, match=r"tokenizer_config\.json cannot be read as JSON: .* use an intact copy"):
        describe_t5(towers, tokenizer=str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"masked": False, "trim": True},
            r"texts\.t5\.trim: without `masked`, every token's state in T5EncoderModel depends on the padding",
        ),
        ({"pooled": True}, r"texts\.t5\.pooled: T5EncoderModel has no pooled output"),
        ({"max_tokens": None}, r"texts\.t5\.max_tokens: T5EncoderModel accepts captions of any length"),
        ({"class_name": "NoSuchModel"}, r"transformers \S+ has no class 'NoSuchModel', which the model in"),
        (
            {"class_name": "T5ForConditionalGeneration"},
            r"texts\.t5: .* not return hidden states when its only input is a caption",
        ),
        (
            {"layer": 99},
            r"texts\.t5\.layer: T5EncoderModel .* no hidden state at index 99\. Use an index from -3 to 2",
        ),
        ({"keep": [[5, 3]]}, r"texts\.t5\.keep: .* must select at least one of the 24 tokens"),
        ({"keep": [[4, 9], [0, 5]]}, r"in increasing order"),
        ({"model": "no/such/place", "tokenizer": "none"}, r"no/such"),
        ({"states": False}, "would store nothing"),
        ({"template": "x"}, "must contain {} as the placeholder for the caption"),
    ],
)
def test_text_towers_that_cannot_be_stored_are_refused_by_name(
    towers: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises((RequestError, ValidationError), match=words):
        describe_t5(towers, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"texts": {}}, "at least 1 item"),
        ({"texts": {"a.b": {"model": "m", "tokenizer": "t"}}}, "'a.b' is not a valid tower name"),
        (
            {"buckets": ["72x64"]},
            r"features.dino: a side of bucket 72x64, resized by a factor of 0\.875, is not a multiple of the patch "
            r"size, 14\. Use multiples of 16 for",
        ),
    ],
)
def test_configs_that_cannot_be_stored_are_refused(
    models: Path, tars: Path, tmp_path: Path, towers: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises((RequestError, ValidationError), match=words):
        describe_encoding(config_of(models, tars, tmp_path, towers, **changes))


def test_the_trainer_reads_every_tower_into_its_batches(root: Path, tmp_path: Path) -> None:
    fields = train_fields(root, tmp_path / "run")
    data = TrainConfig.model_validate(fields).data
    spec = open_data(data, 8)
    assert column_lengths(spec) == {
        "image_latents": None,
        "size": None,
        "text_latents.clip": 16,
        "num_tokens.clip": None,
        "pooled.clip": None,
        "text_latents.t5": T5_LENGTH,
        "num_tokens.t5": None,
        "features.dino": None,
    }
    stored = {s["key"]: s for part in sorted((root / BUCKET).glob("0000*")) for s in read_part(part)}
    batch = next(iter(Loader(data, spec, 8, 0, 0, global_slots(8, 0, 1, 1))))
    for i, key in enumerate(batch.keys):
        for name in column_lengths(spec).keys() - {"num_tokens.clip"}:
            np.testing.assert_array_equal(np.atleast_1d(batch.columns[name][i].numpy()), stored[key][name])
        assert int(batch.columns["num_tokens.clip"][i]) == 16
    assert batch.columns["text_latents.t5"].shape == (8, T5_LENGTH, T5_WIDTH)


def t5_unet(folder: Path) -> str:
    """Write the config of a U-Net with T5's width."""
    (folder / "unet.json").write_text(json.dumps(json.loads(UNET.read_text()) | {"cross_attention_dim": T5_WIDTH}))
    return str(folder / "unet.json")


def test_a_run_names_the_tower_that_it_trains_on(root: Path, tmp_path: Path) -> None:
    fields = train_fields(root, tmp_path / "run", max_steps=2)
    fields["backbone"] = {"config": t5_unet(tmp_path)}

    def run(**data: Any) -> None:
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(fields | {"data": fields["data"] | data}))
        train(["--config", str(path)])

    with pytest.raises(
        RequestError, match=r"names no text tower, so data\.towers must .* selects clip and t5\. Name one such tower in"
    ):
        run()
    with pytest.raises(RequestError, match=r"names texts\.gemma, but the latents root .* has texts\.clip, texts"):
        run(towers=["texts.gemma"])
    run(towers=["texts.t5"])
    losses = [row["loss"] for row in read_json_lines(tmp_path / "run" / "metrics.jsonl")]
    assert len(losses) == 2 and np.isfinite(losses).all()


def test_a_run_reads_only_the_towers_that_it_uses(root: Path, tmp_path: Path) -> None:
    """Of two text towers and features, it reads the text that its network uses, and features only for alignment."""
    fields = train_fields(root, tmp_path / "run")
    states = {"kind": "states", "towers": [["t5"]], "mask": "encoder_attention_mask"}
    held_out = {"root": str(root), "bucket": BUCKET, "samples": 8, "batch_size": 8, "every": 5}
    for repa, of_features in ({}, set()), ({"layer": "mid_block", "hidden": 8}, {"features.dino"}):
        config = TrainConfig.model_validate(
            {
                **fields,
                "backbone": {"config": t5_unet(tmp_path), "inputs": {"encoder_hidden_states": states}},
                "repa": repa,
                "validation": held_out,
                "log": {"every": 5},
            }
        )
        prepared = prepare(config)
        of_text = {"text_latents.t5", "num_tokens.t5"}
        assert column_lengths(prepared.spec).keys() == {"image_latents", "size"} | of_text | of_features
        assert prepared.validation is not None
        assert prepared.validation.batches[0].columns.keys() == {"image_latents", "size"} | of_text


def test_a_run_resumes_only_with_the_tower_that_it_began_with(root: Path, tmp_path: Path) -> None:
    """Two towers of the same width fit the same U-Net, but the fingerprint differs."""
    data = TrainConfig.model_validate(train_fields(root, tmp_path / "run")).data
    found = []
    for tower in ("texts.clip", "texts.t5"):
        spec = open_data(data.model_copy(update={"towers": [tower]}), 8)
        unet = build_network(UNET, 0)
        found.append(make_fingerprint(0, 8, data, spec, ObjectiveConfig(), unet))
    with pytest.raises(RequestError, match=r"towers: clip ≠ t5"):
        check_resume(tmp_path, found[0], found[1])
    without = {key: value for key, value in found[1].items() if key != "backbone"}
    with pytest.raises(RequestError, match=r"backbone: .*clip.* ≠ None"):
        check_resume(tmp_path, found[0], without)


def test_a_caption_that_ends_before_the_first_kept_token(
    models: Path, tars: Path, tmp_path: Path, towers: Path
) -> None:
    """One token represents it."""
    t5 = texts(towers, models)["t5"] | {"keep": [[22, None]], "trim": True}
    loaded = towers_of(config_of(models, tars, tmp_path / "root", towers, texts={"t5": t5}, features={}))
    assert [latents["t5"].num_tokens for latents, _ in loaded.start_captions(["a", "a" * 30])()] == [1, 2]
