"""Compare features with golden values and with the original libraries, and refuse unusable weights.

The libraries are imported by the tests that need them, because each of pytest's processes imports this file.
"""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import CLIPConfig, Dinov2Config, Dinov2Model

from evaluation.features.extractors import (
    ExtractorsConfig,
    count_features,
    describe_extractor,
    load_extractor,
    load_text_features,
)
from evaluation.features.open_clip import read_preprocessing, weights_file
from evaluation.metrics.table import ExtractorName
from shards.base.errors import RequestError

if TYPE_CHECKING:
    from open_clip import CLIP

GOLDEN = [5.3117069853e-08, 6.9220661203e-08, 3.7036953504e-09]


@pytest.fixture(scope="module")
def inception(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A weights file in torch-fidelity's format, with seeded random weights."""
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

    path: Path = tmp_path_factory.mktemp("inception") / "weights.pth"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch_fidelity.feature_extractor_inceptionv3.load_state_dict_from_url", lambda *_, **__: {})
        patch.setattr(FeatureExtractorInceptionV3, "load_state_dict", lambda *_: None)
        torch.manual_seed(0)
        torch.save(FeatureExtractorInceptionV3("inception", ["2048"]).state_dict(), path)
    return path


def test_inception_features_match_golden_values(inception: Path) -> None:
    pixels = np.arange(2 * 40 * 50 * 3, dtype=np.int64).reshape(2, 40, 50, 3).astype(np.uint8)
    features = load_extractor("inception", inception, "cpu")(pixels)
    assert features.shape == (2, count_features("inception", ExtractorsConfig())) and features.dtype == torch.float32
    assert features[0, :3].tolist() == pytest.approx(GOLDEN, rel=1e-3)


def test_unusable_weights_are_refused(tmp_path: Path) -> None:
    torch.save({"weight": Path("x")}, tmp_path / "code.pth")
    with pytest.raises(RequestError, match=r"code\.pth cannot be loaded as a weights-only file"):
        load_extractor("inception", tmp_path / "code.pth", "cpu")
    (file := tmp_path / "file").write_bytes(b"other")
    no_clip = r"does not contain the weights of clip\. Set .* to a transformers folder"
    cases: list[tuple[ExtractorName, dict[str, Any], str]] = [
        ("inception", {"weights": tmp_path / "absent"}, "weights of inception do not exist at"),
        ("inception", {}, r"are not set. Set extractors\.inception\.weights to a local path"),
        ("inception", {"weights": tmp_path}, r"does not contain the weights of inception\. Set .* to torch-fidelity"),
        (
            "inception",
            {"weights": file, "sha256": "0000"},
            r"has the SHA-256 d9298a10.* extractors\.inception\.sha256 is",
        ),
        ("clip", {"weights": file}, no_clip),
        ("clip", {"weights": tmp_path}, no_clip),
    ]
    for kind, given, message in cases:
        with pytest.raises(RequestError, match=message):
            describe_extractor(kind, ExtractorsConfig.model_validate({kind: given}))


@pytest.fixture(scope="module")
def open_clip_folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, "CLIP"]:
    """A small random model, and its folder in the layout that open_clip's `push_to_hf_hub` writes."""
    import open_clip
    from open_clip.push_to_hf_hub import save_for_hf

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
    """Copy the folder, with changes to its preprocessing config."""
    shutil.copytree(folder, copy)
    config = json.loads((copy / "open_clip_config.json").read_text())
    config["preprocess_cfg"] |= changes
    (copy / "open_clip_config.json").write_text(json.dumps(config))
    return copy


def describe_clip(weights: Path) -> dict[str, str]:
    return describe_extractor("clip", with_weights("clip", weights))


def with_weights(kind: ExtractorName, weights: Path) -> ExtractorsConfig:
    return ExtractorsConfig.model_validate({kind: {"weights": weights}})


def test_features_match_those_of_open_clip(open_clip_folder: tuple[Path, "CLIP"], tmp_path: Path) -> None:
    import open_clip

    folder, model = open_clip_folder
    pixels = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
    pictures = [Image.fromarray(each) for each in pixels]
    captions = ["a red square", "two dogs and many more words than the context length allows, " * 3]
    with torch.inference_mode():
        shown = torch.stack([open_clip.image_transform(32, is_train=False)(each) for each in pictures])
        images = model.encode_image(shown)
        texts = model.encode_text(open_clip.get_tokenizer("ViT-B-32", context_length=12)(captions))
    torch.testing.assert_close(load_extractor("clip", folder, "cpu")(pixels), images)
    assert count_features("clip", with_weights("clip", folder)) == images.shape[1]
    torch.testing.assert_close(load_text_features(folder, "cpu")(captions), texts)
    pickled = tmp_path / "pickled"
    shutil.copytree(folder, pickled)
    (pickled / "open_clip_model.safetensors").unlink()
    torch.testing.assert_close(load_extractor("clip", pickled, "cpu")(pixels), images)
    found = describe_clip(folder)
    assert found["resize"] == "bicubic antialias, center" and found["sha256"] != describe_clip(pickled)["sha256"]


def test_resize_mode_squash_matches_open_clip(open_clip_folder: tuple[Path, "CLIP"], tmp_path: Path) -> None:
    from open_clip.transform import PreprocessCfg, image_transform_v2

    changes: dict[str, Any] = {"resize_mode": "squash", "mean": [0.5] * 3, "std": [0.25] * 3}
    folder = with_preprocess(open_clip_folder[0], tmp_path / "squash", **changes)
    pixels = np.random.default_rng(0).integers(0, 256, (2, 48, 64, 3), dtype=np.uint8)
    transform = image_transform_v2(PreprocessCfg(size=32, **changes), is_train=False)
    with torch.inference_mode():
        images = open_clip_folder[1].encode_image(torch.stack([transform(Image.fromarray(each)) for each in pixels]))
    # Pillow rounds resized pixels to whole levels
    torch.testing.assert_close(load_extractor("clip", folder, "cpu")(pixels), images, atol=0.02, rtol=0)
    assert describe_clip(folder)["resize"] == "bicubic antialias"


def test_a_folder_with_both_formats_is_read_as_transformers(
    open_clip_folder: tuple[Path, "CLIP"], tmp_path: Path
) -> None:
    both = with_preprocess(open_clip_folder[0], tmp_path / "both")
    CLIPConfig(projection_dim=8).save_pretrained(both)
    (both / "model.safetensors").write_bytes(b"")
    assert describe_clip(both)["sha256"] != describe_clip(open_clip_folder[0])["sha256"] and weights_file(both) is None
    assert count_features("clip", with_weights("clip", both)) == 8
    (both / "config.json").write_text('{"architecture": "vit_base_patch16_clip_224"}')  # as timm writes it
    assert weights_file(both) == both / "open_clip_model.safetensors"
    (both / "open_clip_config.json").unlink()
    with pytest.raises(RequestError, match="contains a model of type None instead of 'clip'"):
        describe_clip(both)


def test_unsupported_open_clip_folders_are_refused(open_clip_folder: tuple[Path, "CLIP"], tmp_path: Path) -> None:
    bilinear = with_preprocess(open_clip_folder[0], tmp_path / "bilinear", interpolation="bilinear")
    with pytest.raises(RequestError, match="asks for bilinear interpolation, resize mode shortest and image size 32"):
        describe_clip(bilinear)
    odd = with_preprocess(open_clip_folder[0], tmp_path / "odd", mean=None, fill="white")  # open_clip ignores both
    assert read_preprocessing(odd) == read_preprocessing(open_clip_folder[0])
    hub = with_preprocess(open_clip_folder[0], tmp_path / "hub")
    config = json.loads((hub / "open_clip_config.json").read_text())
    config["model_cfg"]["text_cfg"]["hf_model_name"] = "org/text"
    (hub / "open_clip_config.json").write_text(json.dumps(config))
    with pytest.raises(RequestError, match=r"loads its text model from the hub \(org/text\)"):
        describe_clip(hub)
    broken = with_preprocess(open_clip_folder[0], tmp_path / "broken")
    (broken / "open_clip_model.safetensors").write_bytes(b"weights")
    with pytest.raises(RequestError, match=r"open_clip cannot read .*open_clip_model\.safetensors"):
        load_extractor("clip", broken, "cpu")
    (broken / "open_clip_config.json").write_text("{}")
    with pytest.raises(RequestError, match=r"open_clip cannot read .*open_clip_config\.json"):
        describe_clip(broken)


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
    assert count_features("dinov2", with_weights("dinov2", tmp_path)) == 16
