"""Roots and U-Nets that do not fit each other are refused before anything is written, with the differences."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator

from bench.kit.roots import make_root
from shards.base.errors import RequestError, exit_code_of
from shards.format.encoding import EncodingRecord
from shards.format.towers import Weights
from shards.open import open_store
from tests.runs import UNET, train_fields, write_config
from train.__main__ import run
from train.run.fingerprint import check_same_everywhere

OTHER = Weights(name="none", sha256=64 * "b")
WRONG = [
    ("image", "scale", (0.13,) * 4, r"image.scale: [0.5, 0.5, 0.5, 0.5] ≠ [0.13, 0.13, 0.13, 0.13]"),
    ("image", "shift", (0.0, 0.0, 0.0, 0.1), r"image.shift: [0.0, 0.0, 0.0, 0.0] ≠ [0.0, 0.0, 0.0, 0.1]"),
    ("image", "channels", 16, r"image.channels: 4 ≠ 16"),
    ("image", "posterior", "mean", r"image.posterior: 'moments' ≠ 'mean'"),
    ("text", "width", 32, r"texts.text.width: 16 ≠ 32"),
    ("text", "length", 8, r"texts.text.length: 16 ≠ 8"),
    ("text", "trim", True, r"texts.text.trim: False ≠ True"),
    ("text", "masked", True, r"texts.text.masked: False ≠ True"),
    ("image", "weights", OTHER, r"image.weights.sha256"),
    ("text", "weights", OTHER, r"texts.text.weights.sha256"),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("roots") / "root", {"64x64": [20], "64x96": [20], "72x72": [20]})


def another(root: Path, copy: Path, section: str, **fields: Any) -> Path:
    """Copy a root and change its encoding.json."""
    shutil.copytree(root, copy)
    encoding = EncodingRecord.load(open_store(root))
    tower = (encoding.image if section == "image" else encoding.texts[section]).model_copy(update=fields)
    changed = {"image": tower} if section == "image" else {"texts": {section: tower}}
    encoding.model_copy(update=changed).save(open_store(copy))
    return copy


def refusal(folder: Path, fields: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the error of a refused training run on one line."""
    config = write_config(folder, fields)
    assert exit_code_of(lambda: run(["--config", str(config)])) == 2
    assert not Path(fields["run_dir"]).exists()
    return capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(("section", "name", "value", "words"), WRONG, ids=[f"{row[0]}.{row[1]}" for row in WRONG])
def test_roots_that_mean_different_things_are_not_mixed(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], section: str, name: str, value: Any, words: str
) -> None:
    other = another(root, tmp_path / "other", section, **{name: value})
    streams = [{"root": str(place), "bucket": "64x64"} for place in (root, other)]
    message = refusal(tmp_path, train_fields(root, tmp_path / "run", data={"streams": streams}), capsys)
    assert words in message and f"{other} cannot be mixed" in message


def test_a_validation_root_of_another_encoding(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = another(root, tmp_path / "other", "image", scale=(0.25,) * 4)
    validation = {"root": str(other), "bucket": "64x64", "samples": 8}
    message = refusal(tmp_path, train_fields(root, tmp_path / "run", validation=validation), capsys)
    assert f"The validation root {other} is encoded differently from the training data: image.scale: [0.5," in message


def test_a_validation_bucket_that_the_network_cannot_halve(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sides of the training bucket, 8 and 8, can be halved once more than those of this one, 12 and 8."""
    network = tmp_path / "unet.json"
    network.write_text(json.dumps(json.loads(UNET.read_text()) | DEEPER))
    validation = {"root": str(root), "bucket": "64x96", "samples": 1}
    fields = train_fields(root, tmp_path / "run", network, validation=validation)
    assert "but the latents of bucket 64x96 are (12, 8)" in refusal(tmp_path, fields, capsys)


DEEPER = {
    "block_out_channels": [8, 8, 8, 8],
    "down_block_types": ["DownBlock2D"] * 4,
    "up_block_types": ["UpBlock2D"] * 4,
}
TEXT_TIME = {
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 64,
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"in_channels": 16, "out_channels": 16}, "it maps 16 to 16 channels, but the latents have 4"),
        ({"cross_attention_dim": 32}, "it attends to states of width 32, but the text latents have width 16"),
        (
            {"cross_attention_dim": [16, 32]},
            "it attends to states of width [16, 32], but the text latents have width 16",
        ),
        ({"num_class_embeds": 10}, "with num_class_embeds 10, it requires inputs that this trainer does not provide"),
        ({"class_embed_type": "timestep"}, "with class_embed_type timestep, it requires inputs"),
        (TEXT_TIME, "with addition_embed_type text_time, it requires the input added_cond_kwargs"),
        # a side of 12 can be halved to 6 and 3, but not a third time
        (DEEPER, "it downsamples both sides by 8, but the latents of bucket 64x96 are (12, 8)"),
    ],
)
def test_a_unet_that_does_not_fit_the_latents(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], words: str
) -> None:
    (unet := tmp_path / "unet.json").write_text(json.dumps(json.loads(UNET.read_text()) | change))
    backbone, data = {"config": str(unet)}, {"streams": [{"root": str(root), "bucket": "64x96"}]}
    message = refusal(tmp_path, train_fields(root, tmp_path / "run", backbone=backbone, data=data), capsys)
    assert words in message and "Set `backbone.config` to a network that fits them, or train on a different" in message


def test_a_unet_that_averages_over_hidden_padding(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    masked = another(root, tmp_path / "masked", "text", masked=True)
    fields = json.loads(UNET.read_text()) | {"addition_embed_type": "text", "addition_embed_type_num_heads": 1}
    (unet := tmp_path / "unet.json").write_text(json.dumps(fields | {"encoder_hid_dim": 16}))
    backbone, data = {"config": str(unet)}, {"streams": [{"root": str(masked), "bucket": "64x64"}]}
    message = refusal(tmp_path, train_fields(masked, tmp_path / "run", backbone=backbone, data=data), capsys)
    assert "with addition_embed_type text, it averages over all tokens" in message


ONE_LEVEL = {"block_out_channels": [8], "down_block_types": ["DownBlock2D"], "up_block_types": ["UpBlock2D"]}
SANA = {
    "_class_name": "SanaTransformer2DModel", "in_channels": 4, "out_channels": 4, "caption_channels": 16,
    "attention_head_dim": 4, "num_attention_heads": 2, "cross_attention_head_dim": 4, "num_cross_attention_heads": 2,
    "cross_attention_dim": 8, "num_layers": 1,
}  # fmt: skip


@pytest.mark.parametrize("fields", [json.loads(UNET.read_text()) | ONE_LEVEL, SANA], ids=["unet", "transformer"])
def test_odd_sides_fit_a_network_that_halves_nothing(root: Path, tmp_path: Path, fields: dict[str, Any]) -> None:
    (tmp_path / "backbone.json").write_text(json.dumps(fields))
    backbone = {"config": str(tmp_path / "backbone.json")}
    data = {"streams": [{"root": str(root), "bucket": "72x72"}]}
    fields = train_fields(root, tmp_path / "run", backbone=backbone, data=data)
    run(["check", "--config", str(write_config(tmp_path, fields))])


def test_a_unet_config_that_is_no_object(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (unet := tmp_path / "unet.json").write_text('"runwayml/stable-diffusion-v1-5"')
    message = refusal(tmp_path, train_fields(root, tmp_path / "run", backbone={"config": str(unet)}), capsys)
    assert f"{unet} is not a JSON object" in message


@pytest.mark.parametrize("run_dir", ["run", "run/phase1"])
def test_a_run_folder_that_cannot_be_one(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], run_dir: str
) -> None:
    (tmp_path / "run").write_bytes(b"")
    config = write_config(tmp_path, train_fields(root, tmp_path / run_dir))
    for command in ([], ["check"]):
        assert exit_code_of(lambda command=command: run([*command, "--config", str(config)])) == 2  # type: ignore[misc]
        assert f"{tmp_path / 'run'} is a file" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(
    ("section", "fields"),
    [
        ("optimizer", {"betas": [1.0, 0.999]}),
        ("optimizer", {"lr": float("inf")}),
        ("objective", {"beta_end": 12.0}),
        ("data", {"streams": [{"root": "x", "bucket": "64x64", "weight": 1e300}]}),
    ],
)
def test_numbers_that_nothing_can_be_trained_with(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], section: str, fields: dict[str, Any]
) -> None:
    (name,) = fields
    message = refusal(tmp_path, train_fields(root, tmp_path / "run", **{section: fields}), capsys)
    assert f"{section}.{name}" in message


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("LOCAL_WORLD_SIZE", "8", "not spread evenly over the nodes: WORLD_SIZE is 1, and LOCAL_WORLD_SIZE is 8"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS is set"),
    ],
)
def test_variables_of_an_unsupported_launch(
    root: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: str,
    words: str,
) -> None:
    monkeypatch.setenv(name, value)
    assert words in refusal(tmp_path, train_fields(root, tmp_path / "run"), capsys)


@pytest.mark.parametrize("own", [{"seed": 1}, {"seed": 1, "train_only": ["x"]}])
def test_processes_with_other_configs_name_what_differs(own: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A field that only some processes have differs, too."""
    both = [json.dumps(fields) for fields in ({"seed": 1}, {"seed": 1, "train_only": ["x"]})]
    monkeypatch.setattr("train.run.fingerprint.gather_object", lambda _: [(text, None) for text in both])
    with pytest.raises(RequestError, match="they do not agree on train_only, because"):
        check_same_everywhere(Accelerator(cpu=True), own, None)
