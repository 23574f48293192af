"""Several captions per sample: each is stored as it would be alone, along a leading axis; missing ones are left out."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from precompute.config import describe_encoding
from shards.__main__ import run
from shards.base.errors import RequestError
from shards.format.encoding import EncodingRecord
from shards.open import open_store
from shards.root.reading import captions, read_part, text_latents
from shards.root.shared import check_root
from shards.tools.verify import verify_root
from tests.fixtures import encode_all, precompute_config
from tests.roots import load_tars, part_of
from tests.tiny import TEXT_LENGTH, make_samples, make_tar

FIELDS = ["json:blip", "txt"]
BUCKETS = ["64x64", "128x128"]


@pytest.fixture(scope="module")
def captioned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tar of 12 samples: number 0 has no blip, 1 no txt, 2 neither, 3 invalid bytes in both, 4 a long blip."""
    folder = tmp_path_factory.mktemp("captioned")
    samples = make_samples(0, 12, [(80, 64), (200, 150)])
    for i, (_, members) in enumerate(samples):
        metadata = json.loads(members["json"]) | {"blip": f"blip {i}"}
        members["txt"] = f"t{i}".encode()
        if i in (0, 2):
            del metadata["blip"]
        if i in (1, 2):
            del members["txt"]
        if i == 3:
            metadata["blip"] = "b\ud800\x07."
            members["txt"] = b"t\xff"
        if i == 4:
            metadata["blip"] = "a b " * 20
        members["json"] = json.dumps(metadata).encode()
    make_tar(folder, "00000", samples)
    return folder


def encoded(models: Path, tars: Path, root: Path, fields: Sequence[str] = FIELDS, **text: object) -> Path:
    encode_all(
        precompute_config(models, tars, root, captions=list(fields), text=text, limits={"max_caption_characters": 40}),
    )
    return root


@pytest.fixture(scope="module")
def roots(models: Path, captioned: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Roots with both captions, by whether float8 latents are trimmed. Tests must not modify them."""
    folder = tmp_path_factory.mktemp("roots")
    how = {"storage": "float8"}
    return {trim: encoded(models, captioned, folder / str(trim), **how, trim=trim) for trim in (False, True)}


def test_each_caption_is_stored_as_if_it_were_alone(
    models: Path, captioned: Path, tmp_path: Path, roots: dict[bool, Path]
) -> None:
    """Text is stored as trimmed float8 here; tests/shards/format/test_text.py tests every kind of storage."""
    both = roots[True]
    alone = {f: encoded(models, captioned, tmp_path / f, [f], storage="float8", trim=True) for f in FIELDS}
    for bucket in BUCKETS:
        found: dict[str, list[tuple[str, dict[str, np.ndarray]]]] = {}
        for field in FIELDS:  # stored in the order of the config
            encoding = EncodingRecord.load(open_store(alone[field]))
            for sample in read_part(part_of(alone[field], bucket, "00000")):
                (caption,), (latents,) = captions(sample, encoding), text_latents(sample, encoding)
                found.setdefault(sample["key"], []).append((caption, latents))
        encoding = EncodingRecord.load(open_store(both))
        rows = {sample["key"]: sample for sample in read_part(part_of(both, bucket, "00000"))}
        assert rows.keys() == found.keys() and len(rows) == {"64x64": 11, "128x128": 6}[bucket]
        for key, sample in rows.items():
            assert captions(sample, encoding) == [caption for caption, _ in found[key]]
            for one, other in zip(text_latents(sample, encoding), found[key], strict=True):
                np.testing.assert_array_equal(one["text"], other[1]["text"])
    assert list(verify_root(open_store(both))) == []


def test_layout_of_a_stored_sample(roots: dict[bool, Path]) -> None:
    """`caption` has an entry per field, so that captions can be told apart. Only existing ones have latents."""
    for trim, root in roots.items():
        rows = {int(s["key"]): s for s in read_part(part_of(root, "64x64", "00000"))}
        assert [json.loads(rows[i]["caption"]) for i in (0, 1, 5)] == [[None, "t0"], ["blip 1", None], ["blip 5", "t5"]]
        # begin, one token per letter, end
        kept = {0: [4], 1: [7], 5: [7, 4]} if trim else {0: [TEXT_LENGTH], 1: [TEXT_LENGTH], 5: [TEXT_LENGTH] * 2}
        for i, lengths in kept.items():
            assert rows[i]["text_latents.text"].shape[:2] == (len(lengths), max(lengths))
            assert rows[i]["text_scales.text"].shape == (len(lengths), max(lengths))
            if trim:
                assert rows[i]["num_tokens.text"].tolist() == lengths
                assert not rows[i]["text_latents.text"][-1, lengths[-1] :].any()
            else:
                assert "num_tokens.text" not in rows[i]


def test_captions_are_counted_per_bucket_in_receipts_and_once_in_stats(
    roots: dict[bool, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    root = roots[True]
    receipt = load_tars(open_store(root))[0]
    assert receipt.rejected == {"no_caption": 1}
    changes = {"invalid_utf8": 2, "control_characters": 1, "too_long": 1, "truncated": 1}
    assert receipt.parts["64x64"].captions == {"stored": 20, **changes}
    # each part's table has them per sample; the receipt has the sums
    table = pq.read_table(part_of(root, "64x64", "00000") / "samples.parquet").to_pylist()
    assert {name: sum(row[name] for row in table) for name in changes} == changes
    assert [row["captions"] for row in table] == [1, 1, *[2] * 9]
    run(["stats", str(root)])
    assert receipt.parts["128x128"].captions["stored"] == 11  # captions of the same samples
    printed = capsys.readouterr().out
    assert "captions: 20 stored; changed: invalid utf8 2, control characters 1, too long 1, truncated 1\n" in printed


def test_the_fields_and_the_limit_are_part_of_the_encoding(
    models: Path, captioned: Path, roots: dict[bool, Path]
) -> None:
    root = roots[False]
    with pytest.raises(RequestError) as caught:
        check_root(open_store(root), describe_encoding(precompute_config(models, captioned, root)))
    assert "captions: ['json:blip', 'txt'] ≠ ['txt']" in str(caught.value)
    assert "max_characters: 40 ≠ 4096" in str(caught.value)
    assert EncodingRecord.load(open_store(root)).captions == tuple(FIELDS)


def test_verify_finds_a_lost_caption(models: Path, captioned: Path, tmp_path: Path) -> None:
    """A writer that stores fewer captions than latents is noticed, although the files agree with their receipt."""
    from shards.root.writing import caption_text

    def lose_one(texts: Sequence[str | None], encoding: EncodingRecord) -> str:
        return json.dumps([None, *json.loads(caption_text(texts, encoding))[1:]])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shards.root.writing.caption_text", lose_one)
        encoded(models, captioned, tmp_path / "root")
    wrong = list(verify_root(open_store(tmp_path / "root")))
    assert wrong and all("has different numbers of captions and text latents" in line for line in wrong)
