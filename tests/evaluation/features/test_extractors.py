"""Features against golden ones and the libraries' own, and weights that are refused."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from open_clip.push_to_hf_hub import save_for_hf
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image
from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
from transformers import CLIPConfig, Dinov2Config, Dinov2Model

from evaluation.features.extractors import (
    ExtractorConfig,
    ExtractorsConfig,
    describe_extractor,
    load_extractor,
    load_text_features,
)
from evaluation.features.open_clip import read_view, weights_file
from shards.base.errors import RequestError

GOLDEN = [5.3117069853e-08, 6.9220661203e-08, 3.7036953504e-09]


@pytest.fixture(scope="module")
def inception(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A seeded random Inception in the file that torch-fidelity reads."""
    path: Path = tmp_path_factory.mktemp("inception") / "weights.pth"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch_fidelity.feature_extractor_inceptionv3.load_state_dict_from_url", lambda *_, **__: {})
        patch.setattr(FeatureExtractorInceptionV3, "load_state_dict", lambda *_: None)
        torch.manual_seed(0)
        torch.save(FeatureExtractorInceptionV3("inception", ["2048"]).state_dict(), path)
    return path


def test_golden_features_of_a_seeded_random_inception(inception: Path) -> None:
    pixels = np.arange(2 * 40 * 50 * 3, dtype=np.int64).reshape(2, 40, 50, 3).astype(np.uint8)
    features = load_extractor("inception", inception, "cpu")(pixels)
    assert features.shape == (2, 2048) and features.dtype == torch.float32
    assert features[0, :3].tolist() == pytest.approx(GOLDEN, rel=1e-3)


def test_weights_that_would_run_code_are_refused(tmp_path: Path) -> None:
    torch.save({"weight": Path("x")}, tmp_path / "weights.pth")
    with pytest.raises(RequestError, match=r"weights\.pth cannot be read as weights alone"):
        load_extractor("inception", tmp_path / "weights.pth", "cpu")


def test_absent_and_other_weights_are_named(tmp_path: Path) -> None:
    path = tmp_path / "inception.pth"
    with pytest.raises(RequestError, match="weights of inception are not at"):
        describe_extractor("inception", ExtractorsConfig(inception=ExtractorConfig(weights=path)))
    with pytest.raises(RequestError, match=r"are not given. Give their local path as extractors\.inception\.weights"):
        describe_extractor("inception", ExtractorsConfig())
    with pytest.raises(RequestError, match="is not what inception is read from, torch-fidelity's file"):
        describe_extractor("inception", ExtractorsConfig(inception=ExtractorConfig(weights=tmp_path)))
    path.write_bytes(b"other")
    for weights in (path, tmp_path):  # a file; a folder that has other files
        with pytest.raises(RequestError, match="is not what clip is read from, a transformers folder"):
            describe_extractor("clip", ExtractorsConfig(clip=ExtractorConfig(weights=weights)))
    with pytest.raises(RequestError, match=r"hashes to d9298a10.* asks for 0000"):
        config = ExtractorsConfig(inception=ExtractorConfig(weights=path, sha256="0000"))
        describe_extractor("inception", config)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, open_clip.CLIP]:
    """A small random model in a folder as open_clip's `push_to_hf_hub` leaves it, and the model."""
    folder = tmp_path_factory.mktemp("open_clip")
    vision = {"image_size": 32, "layers": 2, "width": 32, "patch_size": 8, "head_width": 16}
    text = {"context_length": 12, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2}
    config = {"embed_dim": 16, "vision_cfg": vision, "text_cfg": text}
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": config}))
    torch.manual_seed(0)
    model = open_clip.create_model(f"local-dir:{folder}", load_weights=False).eval()
    save_for_hf(model, SimpleNamespace(save_pretrained=lambda _: None), config, str(folder))
    return folder, model


def with_preprocess(folder: Path, copy: Path, **changes: object) -> Path:
    """A copy of the folder that shows pictures otherwise."""
    shutil.copytree(folder, copy)
    config = json.loads((copy / "open_clip_config.json").read_text())
    config["preprocess_cfg"] |= changes
    (copy / "open_clip_config.json").write_text(json.dumps(config))
    return copy


def described(weights: Path) -> dict[str, str]:
    return describe_extractor("clip", ExtractorsConfig(clip=ExtractorConfig(weights=weights)))


def test_open_clips_own_files_give_what_open_clip_gives(theirs: tuple[Path, open_clip.CLIP], tmp_path: Path) -> None:
    folder, model = theirs
    pixels = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
    pictures = [Image.fromarray(each) for each in pixels]
    captions = ["a red square", "two dogs and very many more words than there is room for, " * 3]
    with torch.inference_mode():
        shown = torch.stack([open_clip.image_transform(32, is_train=False)(each) for each in pictures])
        images = model.encode_image(shown)
        texts = model.encode_text(open_clip.get_tokenizer("ViT-B-32", context_length=12)(captions))
    torch.testing.assert_close(load_extractor("clip", folder, "cpu")(pixels), images)
    torch.testing.assert_close(load_text_features(folder, "cpu")(captions), texts)
    pickled = tmp_path / "pickled"
    shutil.copytree(folder, pickled)
    (pickled / "open_clip_model.safetensors").unlink()
    torch.testing.assert_close(load_extractor("clip", pickled, "cpu")(pixels), images)
    found = described(folder)
    assert found["resize"] == "bicubic antialias, center" and found["sha256"] != described(pickled)["sha256"]


def test_pictures_are_squashed_where_open_clip_squashes(theirs: tuple[Path, open_clip.CLIP], tmp_path: Path) -> None:
    changes: dict[str, Any] = {"resize_mode": "squash", "mean": [0.5] * 3, "std": [0.25] * 3}
    folder = with_preprocess(theirs[0], tmp_path / "squash", **changes)
    pixels = np.random.default_rng(0).integers(0, 256, (2, 48, 64, 3), dtype=np.uint8)
    transform = image_transform_v2(PreprocessCfg(size=32, **changes), is_train=False)
    with torch.inference_mode():
        images = theirs[1].encode_image(torch.stack([transform(Image.fromarray(each)) for each in pixels]))
    # Pillow rounds what it resized to whole steps of a pixel
    torch.testing.assert_close(load_extractor("clip", folder, "cpu")(pixels), images, atol=0.02, rtol=0)
    assert described(folder)["resize"] == "bicubic antialias"


def test_a_folder_of_both_forms_is_read_as_transformers(theirs: tuple[Path, open_clip.CLIP], tmp_path: Path) -> None:
    both = with_preprocess(theirs[0], tmp_path / "both")
    CLIPConfig(projection_dim=8).save_pretrained(both)
    (both / "model.safetensors").write_bytes(b"")
    assert described(both)["sha256"] != described(theirs[0])["sha256"] and weights_file(both) is None
    (both / "config.json").write_text('{"architecture": "vit_base_patch16_clip_224"}')  # as timm's
    assert weights_file(both) == both / "open_clip_model.safetensors"
    (both / "open_clip_config.json").unlink()
    with pytest.raises(RequestError, match="holds a model of type None, and not clip"):
        described(both)


def test_open_clips_files_that_do_not_fit_are_named(theirs: tuple[Path, open_clip.CLIP], tmp_path: Path) -> None:
    bilinear = with_preprocess(theirs[0], tmp_path / "bilinear", interpolation="bilinear")
    with pytest.raises(RequestError, match="asks for pictures of 32 by bilinear, shortest"):
        described(bilinear)
    odd = with_preprocess(theirs[0], tmp_path / "odd", mean=None, fill="white")  # which open_clip leaves alone
    assert read_view(odd) == read_view(theirs[0])
    hub = with_preprocess(theirs[0], tmp_path / "hub")
    config = json.loads((hub / "open_clip_config.json").read_text())
    config["model_cfg"]["text_cfg"]["hf_model_name"] = "org/text"
    (hub / "open_clip_config.json").write_text(json.dumps(config))
    with pytest.raises(RequestError, match=r"takes its text model from the hub \(org/text\)"):
        described(hub)
    broken = with_preprocess(theirs[0], tmp_path / "broken")
    (broken / "open_clip_model.safetensors").write_bytes(b"weights")
    with pytest.raises(RequestError, match=r"open_clip_model\.safetensors cannot be read by open_clip"):
        load_extractor("clip", broken, "cpu")
    (broken / "open_clip_config.json").write_text("{}")
    with pytest.raises(RequestError, match=r"open_clip_config\.json cannot be read by open_clip"):
        described(broken)


def test_dinov2_features_are_the_class_token(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tower = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 224, "patch_size": 56}
    model = Dinov2Model(Dinov2Config(**tower)).eval()
    model.save_pretrained(tmp_path)
    pixels = np.random.default_rng(0).integers(0, 256, (2, 224, 224, 3), dtype=np.uint8)
    shown = torch.from_numpy((pixels / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]).float().permute(0, 3, 1, 2)
    with torch.inference_mode():
        expected = model(pixel_values=shown).last_hidden_state[:, 0]
    torch.testing.assert_close(load_extractor("dinov2", tmp_path, "cpu")(pixels), expected)
