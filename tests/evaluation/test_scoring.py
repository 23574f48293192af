"""Features and metrics of sample sets, with references that go through stage 1's pixel path."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

from cluster.fleet import FleetConfig
from evaluation.__main__ import run as command
from evaluation.features.extractors import ExtractorConfig, ExtractorsConfig, load_extractor, load_text_features
from evaluation.features.job import extract, reference_features
from evaluation.features.sources import ReferenceConfig, sample_units
from evaluation.metrics.frechet import Moments, frechet_distance
from evaluation.sampling.prompts import Prompt, PromptsConfig, read_prompts
from evaluation.sampling.sets import read_set
from evaluation.scoring import check_measurable, choose_metrics, format_metrics, score
from shards.base.durable import read_sealed_json
from shards.base.errors import DamagedInput, RequestError, WorkError, exit_code_of
from tests.evaluation.sets import draw_here, run_here, sampling
from tests.evaluation.watch.watching import stay_here
from tests.tiny import make_samples, make_tar

TOY = ExtractorsConfig(toy=True, batch_size=16)
WORKERS = FleetConfig(num_gpus=0, num_cpus=1)
MANY = [Prompt(f"p{i}", f"picture {i}") for i in range(31)]


@pytest.fixture(autouse=True)
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evaluation.features.job.run_units", run_here)


@pytest.fixture(scope="module")
def unscored(pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sample set of 62 images of 64 px, two per prompt, without features. Tests must not modify it."""
    place = tmp_path_factory.mktemp("unscored")
    return draw_here(pipeline, place, sampling(part_size=25, batch_size=20, steps=[1]), MANY)


@pytest.fixture(scope="module")
def drawn(unscored: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample set, to which tests may add features and metrics."""
    return Path(shutil.copytree(unscored, tmp_path_factory.mktemp("drawn") / "set"))


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same 70 images in two tars and as image files, and two more entries that are not images."""
    folder = tmp_path_factory.mktemp("references")
    for shard in range(2):
        samples = make_samples(shard, 35, [(80, 64), (200, 150)])
        samples.append((f"{shard:05d}9000", {"jpg": b"<html>", "txt": b"not a picture", "json": b"{}"}))
        make_tar(folder / "tars", f"{shard:05d}", samples)
        for key, members in samples:
            path = folder / "files" / f"{key}.jpg"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(members["jpg"])
    return folder


def test_rejected_reference_images_are_reported_once(
    drawn: Path, references: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (references / "tars" / "loose.png").write_bytes(b"")
    made = reference(tmp_path / "reference", references / "tars")
    for _ in range(2):
        (row,) = score(read_set(drawn), ["toy_kid"], TOY, made, WORKERS)
        assert "N 62 against 70  id" in format_metrics([row])
    (references / "tars" / "loose.png").unlink()
    printed = capsys.readouterr().err
    assert printed.count("contains 70 images. Others were rejected (not_an_image: 2)") == 1
    assert "too_small" not in printed
    assert printed.count("Other images and tars, such as loose.png, will not be read") == 1
    large = ReferenceConfig(place=tmp_path / "large", pictures=made.pictures, size="128x128")
    reference_features(large, "toy", TOY, WORKERS)
    printed = capsys.readouterr().err
    assert "contains 34 images. Others were rejected (not_an_image: 2, too_small: 36)" in printed
    assert "Images that do not cover reference.size (128x128) are too_small" in printed


def reference(place: Path, pictures: Path | None, **changes: Any) -> ReferenceConfig:
    """Return the config of a reference at 64 px."""
    return ReferenceConfig(place=place, pictures=pictures and str(pictures), size="64x64", **changes)


def test_metrics_have_interval_n_and_id_and_features_are_extracted_once(
    drawn: Path, references: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = reference(tmp_path / "reference", references / "tars")
    rows = score(read_set(drawn), choose_metrics(None, TOY, made), TOY, made, WORKERS)
    assert [row["metric"] for row in rows] == ["toy_fid", "toy_kid"]
    assert all(row["low"] <= row["value"] <= row["high"] and row["n"] == 62 for row in rows)
    assert all(row["reference_n"] == 70 and len(row["id"]) == 16 for row in rows)
    assert read_sealed_json(drawn / "metrics.json") == {"metrics": json.loads(json.dumps(rows))}
    assert "toy_fid" in format_metrics(rows) and "against this reference" in format_metrics(rows)
    check_measurable(["toy_fid"], 31, 2, "64x64", TOY, made)
    with pytest.raises(RequestError, match="absent does not exist"):
        check_measurable(["toy_fid"], 31, 2, "64x64", TOY, reference(tmp_path / "reference", tmp_path / "absent"))
    with pytest.raises(RequestError, match=r"needs at least 49 images .* the sample set has only 25 of its 31 images"):
        check_measurable(["toy_fid"], 31, 1, "64x64", TOY, made)
    check_measurable(["toy_kid"], 31, 1, "64x64", TOY, made)

    pixels = [np.asarray(Image.open(path)) for path in sorted((drawn / "pictures").rglob("*.png"))]
    cells = np.stack(pixels).reshape(62, 4, 16, 4, 16, 3).mean((2, 4)).transpose(0, 3, 1, 2).reshape(62, 48) / 255
    found = extract(sample_units(read_set(drawn)), "toy", TOY, drawn, WORKERS).values
    np.testing.assert_allclose(found, cells, atol=1e-5)
    features, _ = reference_features(reference(tmp_path / "reference", None), "toy", TOY, WORKERS)
    distance = frechet_distance(Moments.of(found), Moments.of(features.values))
    assert rows[0]["value"] == pytest.approx(distance)

    monkeypatch.setattr("evaluation.features.job.cached_extractor", None)
    assert score(read_set(drawn), ["toy_fid"], TOY, reference(tmp_path / "reference", None), WORKERS) == rows[:1]


def test_published_moments_are_a_reference_for_frechet_distances(drawn: Path, references: Path, tmp_path: Path) -> None:
    """They give the same value as the images that they were computed from, with a different id."""
    (row,) = score(read_set(drawn), ["toy_fid"], TOY, reference(tmp_path / "reference", references / "tars"), WORKERS)
    features, _ = reference_features(reference(tmp_path / "reference", None), "toy", TOY, WORKERS)
    path, moments = tmp_path / "stats.npz", Moments.of(features.values)
    np.savez(path, mu=moments.mean, sigma=moments.covariance)
    given = ReferenceConfig(moments=path)
    (found,) = score(read_set(drawn), choose_metrics(["toy_fid"], TOY, given), TOY, given, WORKERS)
    assert (found["value"], found["low"], found["high"]) == (row["value"], row["low"], row["high"])
    assert found["id"] != row["id"] and found["reference_n"] is None and "N 62" in format_metrics([found])
    with pytest.raises(RequestError, match=r"toy_kid cannot be computed from reference\.moments"):
        choose_metrics(None, TOY, given)
    with pytest.raises(ValueError, match="set only one of `moments` and `pictures`"):
        ReferenceConfig(moments=path, pictures=str(tmp_path))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (None, "cannot be read as moments"),
        ({"mu": np.zeros(48)}, "cannot be read as moments: .*sigma"),
        ({"mu": np.zeros(48), "sigma": np.eye(47)}, "does not contain valid moments"),
        ({"mu": np.zeros(48), "sigma": np.diag([-20.0, *[1.0] * 47])}, "`sigma` has the eigenvalue -20, but a"),
        ({"mu": np.full(48, np.nan), "sigma": np.eye(48)}, "does not contain valid moments"),
        ({"mu": np.zeros(48), "sigma": np.full((48, 48), np.inf)}, "does not contain valid moments"),
        ({"mu": np.zeros(8), "sigma": np.eye(8)}, "moments have 8 dimensions, but the extractor's features have 48"),
    ],
)
def test_invalid_moments_are_refused(drawn: Path, tmp_path: Path, arrays: dict[str, Any] | None, message: str) -> None:
    path = tmp_path / "stats.npz"
    if arrays is None:
        path.write_bytes(b"<html>")
    else:
        np.savez(path, **arrays)
    with pytest.raises(RequestError, match=message):
        score(read_set(drawn), ["toy_fid"], TOY, ReferenceConfig(moments=path), WORKERS)


def test_limits_are_part_of_a_reference(drawn: Path, references: Path, tmp_path: Path) -> None:
    """Limits decide which images the reference contains."""
    rows = []
    for name, limits in (("all", {}), ("small", {"max_pixels": 6000})):
        made = reference(tmp_path / name, references / "tars", limits=limits)
        rows.append(score(read_set(drawn), ["toy_kid"], TOY, made, WORKERS)[0])
    assert [row["reference_n"] for row in rows] == [70, 36] and rows[0]["id"] != rows[1]["id"]
    with pytest.raises(RequestError, match="contains a reference with different settings: limits"):
        score(read_set(drawn), ["toy_kid"], TOY, reference(tmp_path / "small", references / "tars"), WORKERS)


def test_non_finite_features_are_refused(
    unscored: Path, references: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single non-finite row could give a recall of 0 without any error."""
    toy = load_extractor("toy", None, "cpu")

    def with_infinity(pictures: np.ndarray) -> torch.Tensor:
        features = toy(pictures)
        features[0, 0] = torch.inf
        return features

    monkeypatch.setattr("evaluation.features.job.cached_extractor", lambda *_: with_infinity)
    place = Path(shutil.copytree(unscored, tmp_path / "set"))
    made = reference(tmp_path / "reference", references / "tars")
    with pytest.raises(
        WorkError, match=r"toy returned non-finite features for the part .*, so the weights of toy are damaged"
    ):
        score(read_set(place), ["toy_kid"], TOY, made, WORKERS)
    assert not list(place.rglob("features.npy"))


def test_impossible_metrics_are_refused_before_anything_is_drawn(
    references: Path,
    tmp_path: Path,
    pipeline: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("evaluation.commands.draw_sets", None)
    (tmp_path / "few.txt").write_text("".join(f"picture {i}\n" for i in range(23)))
    (tmp_path / "many.txt").write_text("".join(f"picture {i}\n" for i in range(59)))
    words = ["score", "--model", str(pipeline), "--output", str(tmp_path / "out"), "--extractors.toy", "true"]
    words += ["--sampling.size", "64x64", "--reference.size", "64x64", "--reference.pictures", str(references / "tars")]

    def error_of(prompts: str, *more: str) -> str:
        assert exit_code_of(lambda: command([*words, "--prompts.file", str(tmp_path / prompts), *more])) == 2
        return " ".join(capsys.readouterr().err.split())

    place = ["--reference.place", str(tmp_path / "reference")]
    assert "The number of prompts is 23, but a metric's interval needs at least 24" in error_of("few.txt", *place)
    (tmp_path / "fewer.txt").write_text("".join(f"picture {i}\n" for i in range(58)))
    assert "the sample set has only 48 of its 58 images there" in error_of("fewer.txt", *place)
    assert "Set reference.size to 64x64" in error_of("many.txt", *place, "--reference.size", "128x128")
    assert "No reference is set. Set reference.place" in error_of("many.txt")
    absent = ["--reference.pictures", str(tmp_path / "absent")]
    assert "absent does not exist" in error_of("many.txt", *place, *absent)
    assert "is not a reference: it has no reference.json" in error_of(
        "many.txt", *place, "--reference.pictures", "null"
    )
    assert "sampling.steps.0" in error_of("many.txt", *place, "--sampling.steps", "[0]")


def test_files_and_tars_of_the_same_pictures_give_the_same_metrics(
    drawn: Path, references: Path, tmp_path: Path
) -> None:
    values = []
    for kind in ("tars", "files"):
        made = reference(tmp_path / kind, references / kind)
        values.append(score(read_set(drawn), ["toy_fid"], TOY, made, WORKERS)[0])
        (receipt, *_) = sorted((tmp_path / kind / "receipts").rglob("*.json"))
        assert read_sealed_json(receipt)["rejected"]["not_an_image"] >= 1
    assert values[0]["value"] == pytest.approx(values[1]["value"], rel=1e-6)
    assert values[0]["id"] != values[1]["id"]


def test_invalid_references_are_refused(drawn: Path, references: Path, tmp_path: Path) -> None:
    make_tar(tmp_path / "few", "00000", make_samples(0, 23, [(80, 64)]))
    score(read_set(drawn), ["toy_kid"], TOY, reference(tmp_path / "made", references / "tars"), WORKERS)
    next((tmp_path / "made" / "receipts").rglob("00001.json")).unlink()
    shutil.copytree(references / "files", tmp_path / "files")
    score(read_set(drawn), ["toy_kid"], TOY, reference(tmp_path / "grown", tmp_path / "files"), WORKERS)
    shutil.copy(tmp_path / "files" / "000000000.jpg", tmp_path / "files" / "new.jpg")
    for config, message in (
        (
            ReferenceConfig(place=tmp_path, size="128x128"),
            "samples have size 64x64, but the reference has size 128x128",
        ),
        (ReferenceConfig(size="64x64"), "No reference is set"),
        (reference(tmp_path / "absent", None), "is not a reference"),
        (reference(tmp_path / "absent", tmp_path / "made"), "but no images"),
        (
            reference(tmp_path / "small", tmp_path / "few"),
            "needs at least 24 reference images, but the reference has only 23",
        ),
        (
            reference(tmp_path / "made", None, pixels={"resampling": "lanczos"}),
            "a reference with different settings: resampling: 'bicubic' ≠ 'lan",
        ),
        (reference(tmp_path / "made", None), "features of only 1 of 2 parts"),
        (reference(tmp_path / "grown", tmp_path / "files"), "different settings: files: '"),
    ):
        with pytest.raises((RequestError, WorkError), match=message):
            score(read_set(drawn), ["toy_kid"], TOY, config, WORKERS)


def test_a_damaged_picture_is_named(unscored: Path, tmp_path: Path) -> None:
    place = Path(shutil.copytree(unscored, tmp_path / "set"))
    found = read_set(place)
    (picture,) = (place / "pictures").glob("00001.*/0000030.png")
    picture.write_bytes(b"flipped")
    with pytest.raises(
        DamagedInput, match=r"0000030\.png is damaged.*the folder's receipt in .*, then run the same command"
    ):
        extract(sample_units(found), "toy", TOY, place, WORKERS)


def test_metrics_need_weights() -> None:
    with pytest.raises(RequestError, match="no feature extractor has weights"):
        choose_metrics(None, ExtractorsConfig(), ReferenceConfig())
    with pytest.raises(RequestError, match="weights of clip are not set"):
        choose_metrics(["clip_score"], TOY, ReferenceConfig())


@pytest.fixture(scope="module")
def clip(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CLIP model with small random encoders, and its tokenizer."""
    folder = tmp_path_factory.mktemp("clip")
    tower = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokenizer = CLIPTokenizer.from_pretrained(models / "tokenizer")
    text = tower | {"vocab_size": len(tokenizer), "max_position_embeddings": 16, "eos_token_id": len(tokenizer) - 1}
    vision = tower | {"image_size": 32, "patch_size": 8}
    torch.manual_seed(0)
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=12)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_clip_features_match_transformers(clip: Path, drawn: Path) -> None:
    """The images have the model's input size, so nothing is resized."""
    pixels = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
    mean, std = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
    model = CLIPModel.from_pretrained(clip).eval()
    with torch.inference_mode():
        shown = torch.from_numpy((pixels / 255 - mean) / std).float().permute(0, 3, 1, 2)
        tokens = CLIPTokenizer.from_pretrained(clip)(["a b"], padding="max_length", max_length=16, return_tensors="pt")
        both = model(**tokens, pixel_values=shown)
    images = torch.nn.functional.normalize(load_extractor("clip", clip, "cpu")(pixels), dim=1)
    torch.testing.assert_close(images, both.image_embeds)
    texts = torch.nn.functional.normalize(load_text_features(clip, "cpu")(["a b"]), dim=1)
    torch.testing.assert_close(texts, both.text_embeds)

    given = ExtractorsConfig(clip=ExtractorConfig(weights=clip))
    (row,) = score(read_set(drawn), ["clip_score"], given, ReferenceConfig(), WORKERS)
    assert row["reference_n"] is None and 0 <= row["low"] <= row["value"] <= row["high"]


def test_a_checkpoint_that_appears_while_the_command_starts_is_not_used(
    run_dir: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of the images is named after the step that was the newest when the command started."""
    stay_here(monkeypatch)
    newest = run_dir / "checkpoints" / "step-00000006"
    hidden = newest.rename(run_dir / "hidden")

    def read_late(config: PromptsConfig) -> list[Prompt]:
        if hidden.exists():
            hidden.rename(newest)
        return read_prompts(config)

    monkeypatch.setattr("evaluation.commands.read_prompts", read_late)
    command(["sample", "--model", str(run_dir), *words[: words.index("--poll_seconds")]])
    (record,) = (run_dir / "evaluations").glob("*/model.json")
    assert (record.parent.name, read_sealed_json(record)["step"]) == ("step-00000004-auto", 4)


def test_score_evaluates_the_requested_checkpoint(
    run_dir: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Evaluate an older checkpoint, a missing one and a damaged one."""
    stay_here(monkeypatch)

    def score_step(step: int, code: int) -> str:
        options = [*words[: words.index("--poll_seconds")], "--weights", "raw", "--step", str(step)]
        assert exit_code_of(lambda: command(["score", "--model", str(run_dir), *options])) == code
        printed = capsys.readouterr()
        return (printed.out + printed.err).replace("\n", " ")

    output = score_step(2, 0)
    assert f"{run_dir} was trained on images of 64x64, but images of 32x32 are drawn." in output
    rows = read_sealed_json(run_dir / "evaluations" / "step-00000002-raw" / "g8-s1-own" / "metrics.json")["metrics"]
    assert [(row["metric"], row["step"], row["weights"]) for row in rows] == [
        ("toy_fid", 2, "raw"),
        ("toy_kid", 2, "raw"),
    ]
    assert f"{rows[0]['value']:.4f}" in output
    assert "has no checkpoint at step 3. Available steps: 2, 4, 6." in score_step(3, 2)
    weights = run_dir / "checkpoints" / "step-00000004" / "unet" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    error = score_step(4, 1)
    assert "The checkpoint at step 4 in" in error and "does not match its SHA-256" in error
