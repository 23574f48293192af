"""Aspect buckets in stage 1: encoding, adding them to a root, and training on several shapes."""

import json
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from precompute.__main__ import run
from precompute.config import describe_encoding
from precompute.input.tars import Tar
from shards.__main__ import run as run_shards
from shards.base.errors import RequestError
from shards.format.buckets import AspectTable
from shards.open import open_store
from shards.root.committed import load_receipts
from shards.root.shared import check_rules
from shards.tools.verify import verify_root
from tests.fixtures import encode_all, folder_of, precompute_config
from tests.roots import load_tars, part_of, precompute_arguments, rows, tree
from tests.runs import train_fields, write_config
from tests.tiny import make_samples, make_tar
from train.__main__ import run as train

ASPECT = {"bases": [64], "step": 16}
TABLE = AspectTable(64, 16, 2.0)  # 48x96 48x80 64x64 80x48 96x48
# landscape, small landscape, portrait, square, too small for all, nearly square and large enough for 128x128
SIZES = [(150, 100), (90, 60), (100, 220), (70, 66), (50, 50), (140, 130)]


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tar of 36 samples, six of each size, plus one that is not an image."""
    folder = tmp_path_factory.mktemp("shapes")
    bad = ("000009999", {"jpg": b"<html>", "txt": b"not a picture"})
    make_tar(folder, "00000", [*make_samples(0, 36, SIZES), bad])
    return folder


@pytest.fixture(scope="module")
def aspect_root(shapes: Path, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root that tests must not modify."""
    config = precompute_config(models, shapes, tmp_path_factory.mktemp("aspect") / "root", aspect=ASPECT)
    encode_all(config)
    return folder_of(config)


def test_each_image_is_in_every_square_bucket_and_one_aspect_bucket(aspect_root: Path, shapes: Path) -> None:
    found: dict[str, set[str]] = {}
    buckets = sorted(path.name for path in aspect_root.glob("[0-9]*x*"))
    assert buckets == ["128x128", "48x80", "48x96", "64x64", "80x48", "96x48"]
    for bucket in buckets:
        if load_tars(open_store(aspect_root))[0].parts[bucket].samples:
            for row in rows(aspect_root, bucket):
                found.setdefault(row["key"], set()).add(bucket)
                width, height = map(int, bucket.split("x"))
                assert row["image_latents"].shape == (8, height // 8, width // 8)
    by_size = [{"64x64", "80x48"}, {"80x48"}, {"64x64", "48x96"}, {"64x64"}, None, {"64x64", "128x128"}]
    for i, sample in enumerate(Tar(shapes / "00000.tar", 1 << 24).samples()):
        expected = by_size[i % 6] if i < 36 else None
        assert found.get(sample.key) == expected, (i, SIZES[i % 6])


def test_accounting_adds_up_and_images_of_other_buckets_are_not_rejects(aspect_root: Path) -> None:
    receipt = load_tars(open_store(aspect_root))[0]
    assert (receipt.samples_in, receipt.encoded) == (37, 30)
    assert receipt.rejected == {"not_an_image": 1, "too_small": 6}
    refused = {name: part.refused for name, part in receipt.parts.items()}
    assert refused["80x48"] == {"not_an_image": 1, "other_bucket": 18, "too_small": 6}
    assert refused["96x48"] == {"not_an_image": 1, "other_bucket": 30, "too_small": 6}
    assert refused["64x64"] == {"not_an_image": 1, "too_small": 12}  # the square is in `buckets`: it takes all
    assert receipt.parts["64x64"].rule == "covers"
    assert receipt.parts["80x48"].rule == "nearest, base 64, step 16, max_ratio 2"
    listed = Counter(pq.read_table(part_of(aspect_root, "80x48", "00000") / "refused.parquet")["reason"].to_pylist())
    assert listed == {"not_an_image": 1, "too_small": 6}


def test_without_its_square_bucket_an_image_goes_to_the_nearest_one(shapes: Path, models: Path, tmp_path: Path) -> None:
    config = precompute_config(models, shapes, tmp_path / "root", buckets=["128x128"], aspect=ASPECT)
    encode_all(config)
    receipt = load_tars(open_store(config.output))[0]
    assert receipt.parts["64x64"].samples == 12
    assert receipt.parts["64x64"].refused == {"not_an_image": 1, "other_bucket": 18, "too_small": 6}
    assert sum(receipt.parts[str(bucket)].samples for bucket in TABLE.buckets) == receipt.encoded == 30
    assert list(verify_root(open_store(config.output))) == []


def test_empty_parts_are_valid(aspect_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert load_tars(open_store(aspect_root))[0].parts["96x48"].samples == 0
    assert list(verify_root(open_store(aspect_root))) == []
    run_shards(["stats", str(aspect_root)])
    assert "96x48" in capsys.readouterr().out


def test_adding_tables_later_gives_the_same_root(aspect_root: Path, shapes: Path, models: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    encode_all(precompute_config(models, shapes, root, buckets=["64x64"]))
    encode_all(precompute_config(models, shapes, root, aspect=ASPECT))
    expected, found = tree(aspect_root), tree(root)
    assert expected.keys() == found.keys()
    assert {name.split("/")[0] for name in expected if expected[name] != found[name]} == {"commits"}
    timed = {"started", "seconds", "attempts", "token"}
    for one, two in zip(load_receipts(open_store(aspect_root)), load_receipts(open_store(root)), strict=True):
        assert one.model_dump(exclude=timed) == two.model_dump(exclude=timed)


@pytest.mark.parametrize(
    ("buckets", "aspect", "message"),
    [
        (["64x64"], {"bases": [64], "step": 8}, "`nearest, base 64, step 16, max_ratio 2`.*step 8, max_ratio 2`"),
        (["64x64"], {"bases": [64], "step": 16, "max_ratio": 1.7}, "max_ratio 2`.*max_ratio 1.7`"),
        (["128x128"], ASPECT, "bucket 64x64 by the rule `covers`"),
        (["64x64", "80x48"], {}, "bucket 80x48 by the rule `nearest.*would use `covers`"),
    ],
    ids=["step", "ratio", "square", "explicit"],
)
def test_a_bucket_keeps_one_rule(
    aspect_root: Path, shapes: Path, models: Path, buckets: list[str], aspect: dict, message: str
) -> None:
    words = precompute_arguments(models, shapes, aspect_root)
    words[words.index("--buckets") + 1] = json.dumps(buckets)
    words += [word for key, value in aspect.items() for word in (f"--aspect.{key}", json.dumps(value))]
    with pytest.raises(RequestError, match=message):  # before anything starts
        run(words)


def test_buckets_that_may_be_added(aspect_root: Path, shapes: Path, models: Path) -> None:
    for buckets, aspect in (
        (["256x256"], {}),
        (["64x64", "128x128"], {"bases": [64, 128], "step": 16}),
        (["128x128"], {"bases": [128], "step": 32}),
    ):
        config = precompute_config(models, shapes, aspect_root, buckets=buckets, aspect=aspect)
        check_rules(open_store(config.output), config.to_fill.rules)


@pytest.mark.parametrize(
    ("aspect", "message"),
    [
        ({"bases": [0], "step": 16}, "base 0 must be a positive multiple of step 16"),
        ({"bases": [60], "step": 16}, "base 60 must be a positive multiple of step 16"),
        ({"bases": [64, 64], "step": 16}, "listed twice"),
        ({"bases": [512768], "step": 64}, "'362624x725120' is not a bucket"),
        ({"bases": [128, 192], "step": 64, "max_ratio": 6}, "both contain the bucket"),
        ({"bases": [64], "max_ratio": 0.5}, "greater than or equal to 1"),
    ],
)
def test_invalid_tables(aspect: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        precompute_config(Path("models"), Path("tars"), Path("root"), aspect=aspect)


def test_a_table_must_fit_the_vae(models: Path, shapes: Path, tmp_path: Path) -> None:
    config = precompute_config(models, shapes, tmp_path / "root", aspect={"bases": [60], "step": 12})
    with pytest.raises(
        RequestError, match=r"bucket .* is not a multiple of the VAE's downsampling factor, 8.*aspect\.step"
    ):
        describe_encoding(config)


def test_training_accepts_several_shapes(aspect_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A square, a landscape and a portrait stream are accepted, and an empty bucket is refused by name.

    tests/train/test_curves.py trains on such streams.
    """
    fields = train_fields(aspect_root, tmp_path / "run", max_steps=5, global_batch_size=4, microbatch_size=4)
    buckets = ["64x64", "80x48", "48x96"]
    fields["data"]["streams"] = [{"root": str(aspect_root), "bucket": bucket} for bucket in buckets]
    train(["check", "--config", str(write_config(tmp_path, fields))])
    assert "would start from random weights" in capsys.readouterr().out
    fields["data"]["streams"].append({"root": str(aspect_root), "bucket": "96x48"})
    with pytest.raises(RequestError, match="96x48 has 0 samples"):
        train(["--config", str(write_config(tmp_path, fields))])
