"""Every kind of input: recognition, units, captions, and what happens to damaged files."""

import gzip
import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from streaming import MDSWriter
from streaming.base.util import merge_index

from precompute.input import numbering
from precompute.input.find import choose_caption_fields, find_input
from precompute.input.unit import RawSample, Unit
from shards.base.errors import DamagedInput, RequestError
from shards.base.store import LocalStore
from tests.kinds import KINDS, as_files, as_mds, as_parquet, as_tar
from tests.tiny import flip_a_bit, make_samples, make_tar

LIMIT = 1 << 20
SAMPLES = make_samples(0, 10, [(80, 64)])
EXPECTED = [(members["jpg"], members["txt"].decode()) for _, members in SAMPLES]


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbering, "UNIT_SAMPLES", 4)


def read(unit: Unit, policy: str = "reject") -> list[RawSample]:
    with unit.open(LIMIT, policy) as source:  # type: ignore[arg-type]
        samples = list(source.samples())
        record = source.record()
    assert len(str(record["sha256"])) == 64
    num_lost = sum(bool(sample.lost) for sample in samples)
    assert (record.get("lost", 0), record.get("lost_unnamed", 0)) == (num_lost, 0)
    return samples


def caption_of(sample: RawSample, field: str) -> object:
    if field == "txt":
        return sample.caption and sample.caption.decode()
    return sample.metadata.get(field.removeprefix("json:"))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_yields_the_same_images_and_captions(kind: str, tmp_path: Path) -> None:
    KINDS[kind](tmp_path / "input", SAMPLES)
    found = find_input(str(tmp_path / "input"))
    (field,) = choose_caption_fields(found, LIMIT)
    units = found.units(LocalStore(tmp_path / "root"))
    samples = [sample for unit in units for sample in read(unit)]
    assert [(sample.image, caption_of(sample, field)) for sample in samples] == EXPECTED
    assert len({sample.key for sample in samples}) == len(SAMPLES)
    assert len(units) > 1 or kind == "tar"
    assert [unit.name for unit in units] == [f"{i:05d}" for i in range(len(units))]


def names_of(units: list[Unit]) -> list[list[str]]:
    return [[sample.key for sample in read(unit)] for unit in units]


def test_images_added_later_only_create_new_units(tmp_path: Path) -> None:
    store, folder = LocalStore(tmp_path / "root"), tmp_path / "input"
    as_files(folder, SAMPLES)
    before = names_of(find_input(str(folder)).units(store))
    (folder / "0-first.jpg").write_bytes(SAMPLES[0][1]["jpg"])
    assert names_of(find_input(str(folder)).units(store, is_final=False)) == [*before, ["0-first.jpg"]]
    (folder / "0-second.jpg").write_bytes(SAMPLES[0][1]["jpg"])
    after = names_of(find_input(str(folder)).units(store))
    assert after == [*before, ["0-first.jpg", "0-second.jpg"]]
    assert names_of(find_input(str(folder)).units(store)) == after


def test_jobs_that_start_together_agree_on_the_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, folder = LocalStore(tmp_path / "root"), tmp_path / "input"
    as_files(folder, SAMPLES[:6])
    mine = find_input(str(folder))
    create, theirs = LocalStore.create, []

    def create_after_another_job(self: LocalStore, name: str, data: bytes) -> bool:
        monkeypatch.setattr(LocalStore, "create", create)
        (folder / "new.jpg").write_bytes(b"")
        (folder / "new.txt").write_text("new")
        theirs.append(find_input(str(folder)).units(store))
        return self.create(name, data)

    monkeypatch.setattr(LocalStore, "create", create_after_another_job)
    units = mine.units(store)
    assert names_of(units) == names_of(theirs[0])  # including the image that only the other job has seen …
    assert read(units[-1])[-1].caption == b"new"  # … with its caption


def test_a_changed_file_is_refused(tmp_path: Path) -> None:
    store, folder = LocalStore(tmp_path / "root"), tmp_path / "input"
    as_files(folder, SAMPLES)
    find_input(str(folder)).units(store)
    (folder / f"{SAMPLES[3][0]}.jpg").write_bytes(b"another image")
    with pytest.raises(RequestError, match=r"1 file in .* had a different size .*000000003\.jpg.* new names"):
        find_input(str(folder)).units(store)


def without_an_image(folder: Path) -> None:
    (folder / f"{SAMPLES[1][0]}.jpg").unlink()


def cut(folder: Path) -> None:
    path = folder / "train-00000-of-00001.parquet"
    path.write_bytes(path.read_bytes()[:-100])


def fewer_row_groups(folder: Path) -> None:
    path = folder / "train-00000-of-00001.parquet"
    pq.write_table(pq.read_table(path), path)


def zeroed(folder: Path) -> None:
    path = folder / "train-00000-of-00001.parquet"
    data = bytearray(path.read_bytes())
    start = pq.read_metadata(path).row_group(1).column(0).dictionary_page_offset
    start = start or pq.read_metadata(path).row_group(1).column(0).data_page_offset
    data[start : start + 64] = bytes(64)
    path.write_bytes(data)


def without_a_file(folder: Path) -> None:
    sorted(folder.glob("*.mds"))[1].unlink()


def a_bit_of_a_file(folder: Path) -> None:
    flip_a_bit(sorted(folder.glob("*.mds"))[1])


@pytest.mark.parametrize(
    ("kind", "break_it", "message"),
    [
        ("files", without_an_image, "000000001.jpg no longer exists"),
        ("jsonl", without_an_image, "000000001.jpg no longer exists"),
        ("parquet", cut, "is damaged or missing"),
        ("parquet", fewer_row_groups, "no longer has a row group"),
        ("parquet", zeroed, "is damaged or missing"),
        ("mds", without_a_file, "is damaged or missing"),
        ("mds", a_bit_of_a_file, "its sha1 differs"),
    ],
)
def test_damage_after_the_listing(kind: str, break_it: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    KINDS[kind](tmp_path / "input", SAMPLES)
    units = find_input(str(tmp_path / "input")).units()
    break_it(tmp_path / "input")
    with pytest.raises(DamagedInput, match=message):
        names_of(units)
    salvaged = [sample for unit in units for sample in read(unit, "salvage")]
    lost = [sample for sample in salvaged if sample.lost]
    assert len(salvaged) == len(SAMPLES) and len(lost) > 0 and all(message in sample.lost for sample in lost)
    intact = [sample.image for sample in salvaged if not sample.lost]
    assert set(intact) < {image for image, _ in EXPECTED} or (kind == "parquet" and not intact)


def test_a_truncated_parquet_file_is_refused_before_the_job_starts(tmp_path: Path) -> None:
    as_parquet(tmp_path / "input", SAMPLES)
    cut(tmp_path / "input")
    with pytest.raises(RequestError, match=r"train-00000-of-00001\.parquet is not a readable parquet file"):
        find_input(str(tmp_path / "input"))


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_a_compressed_tar_is_the_same_unit(suffix: str, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    as_tar(tmp_path / "plain", [(key, members | {"bin": random.bytes(100_000)}) for key, members in SAMPLES])
    data = (tmp_path / "plain" / "00000.tar").read_bytes()
    (tmp_path / "packed").mkdir()
    packed = gzip.compress(data) if suffix == "gz" else pa.compress(data, "zstd", asbytes=True)
    (tmp_path / "packed" / f"00000.tar.{suffix}").write_bytes(packed)
    records = []
    for folder in ("plain", "packed"):
        (unit,) = find_input(str(tmp_path / folder)).units()
        with unit.open(LIMIT) as source:
            assert [sample.image for sample in source.samples()] == [image for image, _ in EXPECTED]
            records.append(source.record())
    assert records[0]["sha256"] == records[1]["sha256"] and unit.name == "00000"
    (tmp_path / "packed" / f"00000.tar.{suffix}").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(DamagedInput, match=r"cannot be decompressed|truncated|damaged"):
        read(unit)
    assert 0 < sum(not sample.lost for sample in read(unit, "salvage")) < len(SAMPLES)


def test_names_links_and_hidden_files(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "input", tmp_path / "elsewhere"
    as_files(folder, SAMPLES[:1])
    as_files(elsewhere, SAMPLES[1:3])
    odd = os.fsdecode(b"caf\xe9 %20\n.jpg")
    (folder / odd).write_bytes(b"x")
    (folder / ".hidden.jpg").write_bytes(b"x")
    (folder / "inside.jpg").symlink_to(folder / f"{SAMPLES[0][0]}.jpg")
    (folder / "outside.jpg").symlink_to(elsewhere / f"{SAMPLES[1][0]}.jpg")
    (folder / "loop").symlink_to(folder)
    (folder / "gone.jpg").symlink_to(folder / "nothing.jpg")
    found = find_input(str(folder))
    for store in (LocalStore(tmp_path / "root"), LocalStore(tmp_path / "root")):  # the second reads the record
        samples = [sample for unit in found.units(store) for sample in read(unit)]
        assert sorted(sample.key for sample in samples) == sorted(
            [f"{SAMPLES[0][0]}.jpg", "caf\\udce9 %20\n.jpg", "inside.jpg", "outside.jpg"]
        )
    assert found.listing.linked_folders == ["loop"]
    assert "symbolic links to folders are not followed (1, such as loop)" in found.describe(1, ["txt"])


def test_latents_roots_in_the_input_are_not_read(tmp_path: Path) -> None:
    as_files(tmp_path / "input", SAMPLES[:1])
    root = tmp_path / "input" / "latents"
    as_parquet(root, SAMPLES)
    (root / "encoding.json").write_text("{}")
    assert find_input(str(tmp_path / "input")).kind == "a folder of images"
    with pytest.raises(RequestError, match=r"is a latents root.*set `source`"):
        find_input(str(root))


def test_an_input_without_images_says_what_it_contains(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"absent does not exist"):
        find_input(str(tmp_path / "absent"))
    (tmp_path / "notes.md").touch()
    with pytest.raises(RequestError, match=r"contains 1 file \(\.md: 1\), but no images"):
        find_input(str(tmp_path))


def test_an_empty_folder_and_tars_in_subfolders_are_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"does not exist, or contains no files apart from hidden"):
        find_input(str(tmp_path))
    as_tar(tmp_path / "data", SAMPLES[:1])
    with pytest.raises(RequestError, match=r"has tars in subfolders only, such as data/00000\.tar"):
        find_input(str(tmp_path))


def test_images_and_tars_that_are_not_read_are_announced(tmp_path: Path) -> None:
    """A single tar in a folder of images would otherwise hide them."""
    as_files(tmp_path / "input", SAMPLES)
    folder = tmp_path / "input"
    as_tar(folder / "more", SAMPLES[:1])
    (note,) = find_input(str(folder)).notes
    assert note.startswith("the input is read as a folder of images. Other images and tars, such as more/00000.tar")
    as_tar(folder, SAMPLES[:1])
    found = find_input(str(folder))
    assert found.notes[-1].startswith("the input is read as webdataset tars. Other images and tars, such as ")
    assert "will not be read (files: 11)" in found.notes[-1]
    assert found.notes[-1] in found.describe(1, ["txt"])
    as_tar(tmp_path / "tars", SAMPLES)
    assert "is read as" not in " ".join(find_input(str(tmp_path / "tars")).notes)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_with(tmp_path / "input", {"0.jpg": "x", "metadata.csv": "file_name,text\n0.jpg,a cat\n"})

    def refuse(self: LocalStore, name: str) -> bytes:
        raise PermissionError(13, "Permission denied", str(self.root / name))

    monkeypatch.setattr(LocalStore, "read", refuse)
    with pytest.raises(RequestError, match=r"input/metadata\.csv cannot be read: Permission denied\. .* let this user"):
        find_input(str(folder))


def test_why_the_first_units_have_no_samples(tmp_path: Path) -> None:
    as_tar(tmp_path / "twice", [SAMPLES[0], SAMPLES[0]])
    with pytest.raises(
        RequestError, match=r"no intact samples, .*twice/00000\.tar is ambiguous: the key \w+ occurs twice"
    ):
        choose_caption_fields(find_input(str(tmp_path / "twice")), LIMIT)
    as_tar(tmp_path / "empty", [])
    with pytest.raises(RequestError, match="contain no samples"):
        choose_caption_fields(find_input(str(tmp_path / "empty")), LIMIT)


def test_one_file_is_an_input_too(tmp_path: Path) -> None:
    as_parquet(tmp_path / "input", SAMPLES)
    found = find_input(str(tmp_path / "input" / "train-00000-of-00001.parquet"))
    assert sum(len(keys) for keys in names_of(found.units())) == len(SAMPLES)


def test_a_single_tar_is_verified_by_the_files_next_to_it(tmp_path: Path) -> None:
    make_tar(tmp_path, "00000", SAMPLES)
    found = find_input(str(tmp_path / "00000.tar"))
    assert found.notes == () and found.members[0].samples == len(SAMPLES)
    for suffix in ("_stats.json", ".parquet"):
        (tmp_path / f"00000{suffix}").unlink()
    assert find_input(str(tmp_path / "00000.tar")).notes[0].startswith("1 of 1 tars have no NNNNN_stats.json")


def test_several_splits_are_announced(tmp_path: Path) -> None:
    as_parquet(tmp_path / "data", SAMPLES)
    file = tmp_path / "data" / "train-00000-of-00001.parquet"
    shutil.copy(file, tmp_path / "data" / "other.parquet")
    assert find_input(str(tmp_path)).notes == ()
    shutil.copy(file, tmp_path / "data" / "test-00000-of-00001-0123abcd.parquet")
    (note,) = find_input(str(tmp_path)).notes
    assert note.startswith("the input has 2 splits (data/test, data/train), which are encoded together")


def test_messages_about_one_file_name_it(tmp_path: Path) -> None:
    (tmp_path / "input").mkdir()
    for name in ("a", "b"):
        table = pa.table({"image": [b"x"], "caption": ["a cat"], "vlm_caption": ["a small cat"]})
        pq.write_table(table, tmp_path / "input" / f"{name}.parquet")
    file = tmp_path / "input" / "b.parquet"
    found = find_input(str(file))
    assert found.describe(1, ["json:caption"]).startswith(f"Input: {file}, parquet files")
    with pytest.raises(RequestError, match=rf"^{file} has 2 fields(?s:.*)--input {file} --captions json:caption"):
        choose_caption_fields(found, LIMIT)


def test_alt_texts_are_captions(tmp_path: Path) -> None:
    as_files(tmp_path / "input", [(key, {"jpg": members["jpg"]}) for key, members in SAMPLES])
    rows = [{"file_name": f"{key}.jpg", "alt": "cat", "asphalt": "no", "altitude_ref": "sea"} for key, _ in SAMPLES]
    (tmp_path / "input" / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert choose_caption_fields(find_input(str(tmp_path / "input")), LIMIT) == ["json:alt"]


def test_ambiguous_captions_are_asked_for(tmp_path: Path) -> None:
    folder = tmp_path / "input"
    as_files(folder, [(key, {"jpg": members["jpg"]}) for key, members in SAMPLES])
    with pytest.raises(RequestError, match=r"No captions were found.*is read as a folder of images\. Put a text file"):
        choose_caption_fields(find_input(str(folder)), LIMIT)
    for tags, has_captions in (("a red", False), ("a red square", True)):  # captions have three words on average
        rows = [{"file_name": f"{key}.jpg", "note": tags, "licence": "CC0"} for key, _ in SAMPLES]
        (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
        if has_captions:
            assert choose_caption_fields(find_input(str(folder)), LIMIT) == ["json:note"]
        else:
            with pytest.raises(RequestError, match=r"(?s)No captions were found.*json:note: 'a red'"):
                choose_caption_fields(find_input(str(folder)), LIMIT)
    rows = [
        {"file_name": f"{key}.jpg", "caption": "short", "vlm_caption": "long", "licence": "CC0"} for key, _ in SAMPLES
    ]
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(RequestError, match=r'(?s)json:caption: \'short\'.*json:vlm_caption.*--captions json:caption"$'):
        choose_caption_fields(find_input(str(folder)), LIMIT)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("metadata.jsonl", '{"file_name": "a.jpg"}\n{"file_name": ', r"metadata\.jsonl cannot .*line 2 is not a JSON"),
        ("metadata.jsonl", '{"file_name": "a.jpg"}\n[]', r"line 2 is not a JSON object: it is a list"),
        ("metadata.jsonl", '{"file_name": "a.jpg"}\n' * 2, "row 2 lists 'a.jpg', which an earlier row lists"),
        ("metadata.jsonl", '{"name": "a.jpg"}', "line 1 has no field file_name"),
        ("metadata.jsonl", '{"file_name": ["a.jpg"]}', r"row 1 has the file_name \['a\.jpg'\], which is not text"),
        ("metadata.csv", "name,text\na.jpg,b\n", "has no column file_name, but only name, text"),
        ("metadata.csv", "file_name,file_name\na.jpg,b\n", "two columns have the same name"),
        ("metadata.csv", "file_name,text\na.jpg\n", "line 2 has 1 fields instead of 2"),
        ("metadata.csv", "", "has no column file_name"),
        ("metadata.parquet", "PAR1", r"metadata\.parquet cannot be read as a table"),
        ("meta_cap.json", '{"a.jpg": "a caption"}', "does not map names of images to fields"),
        ("meta_cap.json", "[]", "does not map names of images to fields"),
    ],
)
def test_a_bad_table_names_the_row(name: str, content: str, message: str, tmp_path: Path) -> None:
    as_files(tmp_path / "input", SAMPLES[:1])
    (tmp_path / "input" / name).write_text(content)
    with pytest.raises(RequestError, match=message):
        find_input(str(tmp_path / "input"))


def folder_with(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir()
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(text.encode())
    return folder


@pytest.mark.parametrize(
    ("table", "content"),
    [
        ("metadata.csv", "\ufefffile_name,text\r\n./a.jpg,7\r\nb/c.png,true\r\n"),
        ("metadata.csv", 'text,file_name\n"7",a.jpg\ntrue,b\\c.png\n'),
        (
            "metadata.jsonl",
            '\n{"file_name": "a.jpg", "text": "7"}\r\n{"file_name": "b\\\\c.png", "text": "true", "x": {}}',
        ),
        ("meta_cap.json", '{"a": {"text": "7"}, "b/c": {"text": "true"}}'),
    ],
)
def test_tables_as_people_write_them(table: str, content: str, tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "input", {"a.jpg": "x", "b/c.png": "y", table: content})
    (unit,) = find_input(str(folder)).units()
    assert [(sample.key, sample.metadata["text"]) for sample in read(unit)] == [("a.jpg", "7"), ("b/c.png", "true")]


def test_scores_in_a_csv_file_are_numbers(tmp_path: Path) -> None:
    content = "file_name,text,aesthetic,punsafe\na.jpg,5,5.5,\n"
    folder = folder_with(tmp_path / "input", {"a.jpg": "x", "metadata.csv": content})
    (unit,) = find_input(str(folder)).units()
    assert read(unit)[0].metadata == {"text": "5", "aesthetic": "5.5"}


def test_rows_without_an_image_are_announced(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "input", {"a.jpg": "x", "metadata.csv": "file_name,text\na.jpg,b\nb.jpg,c\n"})
    assert "note: 1 row of 2 in metadata.csv name images that do not exist, such as 'b.jpg'" in find_input(
        str(folder)
    ).describe(1, ["json:text"])


def test_files_beside_an_image(tmp_path: Path) -> None:
    files = {"a.JPG": "x", "a.JSON": '{"caption": "a cat"}', "meta_1.jpg": "y", "meta_1.json": '{"caption": "a dog"}'}
    folder = folder_with(tmp_path / "input", files | {"encoding.jpg": "z", "encoding.json": '{"caption": "a bit"}'})
    (unit,) = find_input(str(folder)).units()
    samples = [(sample.key, sample.caption, sample.metadata) for sample in read(unit)]
    assert samples == [
        ("a.JPG", None, {"caption": "a cat"}),
        ("encoding.jpg", None, {"caption": "a bit"}),
        ("meta_1.jpg", None, {"caption": "a dog"}),
    ]


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    files = {"a.jpg": "x" * (LIMIT + 1), "b.jpg": "y", "b.txt": "z" * (LIMIT + 1), "c.jpg": "y"}
    (unit,) = find_input(str(folder_with(tmp_path / "input", files))).units()
    large, also, small = read(unit)
    assert "a.jpg has 1048577 bytes" in large.oversized and "b.txt has 1048577 bytes" in also.oversized
    assert large.image is also.caption is None and small.image == b"y"


@pytest.mark.parametrize(
    ("caption", "change"),
    [("cat", lambda file: file.write_text("longer")), ("cat", lambda file: file.unlink()), ("", Path.unlink)],
)
def test_a_caption_that_changes_after_the_listing_is_damage(
    caption: str, change: Callable[[Path], None], tmp_path: Path
) -> None:
    folder = folder_with(tmp_path / "input", {"a.jpg": "x", "a.txt": caption, "b.jpg": "y", "b.txt": "dog"})
    (unit,) = find_input(str(folder)).units()
    change(folder / "a.txt")
    with pytest.raises(DamagedInput, match=r"a\.txt (has changed since it was listed|no longer exists)"):
        read(unit)
    assert [bool(sample.lost) for sample in read(unit, "salvage")] == [True, False]


def test_another_input_is_refused(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "root")
    find_input(str(folder_with(tmp_path / "a", {"0.jpg": "x"}))).units(store)
    other = folder_with(tmp_path / "b", {"0.jpg": "y"})
    with pytest.raises(
        RequestError, match=r"was created from a folder of images in .*/a, not from .*/b\. Choose a new"
    ):
        find_input(str(other)).units(store)


def test_units_never_share_a_name_with_tars(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "root")
    folder = folder_with(tmp_path / "a", {"0.jpg": "x"})
    find_input(str(folder)).units(store)
    store.write("tars/00000.json", b"{}")
    as_tar(tmp_path / "tars", SAMPLES)
    with pytest.raises(RequestError, match="was created from numbered units"):
        find_input(str(tmp_path / "tars")).units(store)
    store = LocalStore(tmp_path / "root-of-tars")
    store.write("tars/00000.json", b"{}")
    with pytest.raises(RequestError, match="was created from tars"):
        find_input(str(folder)).units(store)


OUTSIDE = {"raw_data": {"basename": "a.mds"}, "zip_data": {"basename": "../a.mds.zstd"}}


@pytest.mark.parametrize("shards", [3, [OUTSIDE], [{"raw_data": {"basename": "../a.mds"}, "zip_data": None}]])
def test_stray_files_do_not_hide_the_images(shards: object, tmp_path: Path) -> None:
    index = json.dumps({"shards": shards})
    folder = folder_with(tmp_path / "input", {"0.jpg": "x", "empty.parquet": "", "index.json": index})
    found = find_input(str(folder))
    assert found.kind == "a folder of images" and "index.json is not a valid index" in found.notes[-1]


LATIN_1 = pa.array([b"caf\xe9"], pa.large_binary()).cast(pa.large_string(), safe=False)
"""Text as Polars stores it, which is not valid UTF-8."""


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"image": [b"x"], "audio": [{"bytes": b"RIFF"}], "mask": [b"m" * 9]}, b"x"),
        ({"picture": [{"bytes": b"x", "path": None}], "tags": [["a", "b"]]}, b"x"),
        ({"jpg": pa.array([b"x"]).dictionary_encode(), "key": pa.array([None], pa.string())}, b"x"),
        ({"image": [{"bytes": b"x"}], "text": pa.array([b"caf\xe9"]).cast(pa.string(), safe=False)}, b"x"),
        ({"image": [{"bytes": b"x"}], "text": LATIN_1}, b"x"),
        ({"image": [{"bytes": b"x"}], "when": pa.array([10**8], pa.int32()).cast(pa.date32())}, b"x"),
        ({"image": pa.array([{"path": "a.jpg"}], pa.struct({"bytes": pa.binary(), "path": pa.string()}))}, None),
    ],
)
def test_columns_with_images(columns: dict[str, object], expected: bytes | None, tmp_path: Path) -> None:
    (tmp_path / "input").mkdir()
    pq.write_table(pa.table(columns), tmp_path / "input" / "a.parquet")
    (unit,) = find_input(str(tmp_path / "input")).units()
    (sample,) = read(unit)
    assert (sample.key, sample.image) == ("a.parquet#0/0", expected)
    assert not {"mask", "audio", "when"} & sample.metadata.keys()


NOT_UTF_8 = pa.array([b"caf\xe9", b"a cat"]).cast(pa.string(), safe=False)


@pytest.mark.parametrize(
    ("column", "values"),
    [
        (NOT_UTF_8, ["caf\udce9", "a cat"]),
        (pa.ListArray.from_arrays([0, 2, 2], NOT_UTF_8), [["caf\udce9", "a cat"], []]),
        (pa.DictionaryArray.from_arrays([1, 0], NOT_UTF_8), ["a cat", "caf\udce9"]),
        (pa.StructArray.from_arrays([NOT_UTF_8], ["en"]), [{"en": "caf\udce9"}, {"en": "a cat"}]),
    ],
    ids=["text", "list", "dictionary", "struct"],
)
def test_text_that_is_not_utf8_costs_only_itself(column: pa.Array, values: list[object], tmp_path: Path) -> None:
    images = pa.StructArray.from_arrays([pa.array([b"x", b"y"]), NOT_UTF_8], ["bytes", "path"])
    (tmp_path / "parquet").mkdir()
    pq.write_table(pa.table({"image": images, "captions": column}), tmp_path / "parquet" / "a.parquet")
    folder = folder_with(tmp_path / "folder", {"0.jpg": "x", "1.jpg": "y"})
    pq.write_table(pa.table({"file_name": ["0.jpg", "1.jpg"], "captions": column}), folder / "metadata.parquet")
    for kind in ("parquet", "folder"):
        (unit,) = find_input(str(tmp_path / kind)).units()
        samples = read(unit)
        assert [sample.image for sample in samples] == [b"x", b"y"]
        if kind == "folder" or not pa.types.is_struct(column.type):  # a parquet file's structs are not read
            assert [sample.metadata["captions"] for sample in samples] == values


def test_a_table_may_name_a_file_that_is_not_utf8(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "input", {"a cat": "", "0.jpg": "x"})
    pq.write_table(pa.table({"file_name": NOT_UTF_8, "text": ["a", "b"]}), folder / "metadata.parquet")
    assert "name images that do not exist, such as 'caf\\udce9'" in "".join(find_input(str(folder)).notes)


def test_several_columns_with_images_are_asked_about(tmp_path: Path) -> None:
    (tmp_path / "input").mkdir()
    table = pa.table({"source": [{"bytes": b"x"}], "target": [{"bytes": b"y"}]})
    pq.write_table(table, tmp_path / "input" / "a.parquet")
    with pytest.raises(RequestError, match="several columns with images: source, target"):
        find_input(str(tmp_path / "input"))


def test_text_and_keys_of_any_type(tmp_path: Path) -> None:
    (tmp_path / "input").mkdir()
    texts = pa.array([b"a cat", b"caf\xe9", None]).cast(pa.string_view(), safe=False)
    rows = {"image": [b"x", b"y", b"z"], "key": [b"a", b"caf\xc3\xa9", b"caf\xe9"], "text": texts}
    pq.write_table(pa.table(rows), tmp_path / "input" / "a.parquet")
    (unit,) = find_input(str(tmp_path / "input")).units()
    assert [(sample.key, sample.metadata) for sample in read(unit)] == [
        ("a", {"text": "a cat"}),
        ("café", {"text": "caf\udce9"}),
        ("caf\\udce9", {}),
    ]


def test_keys_need_only_be_unique_within_a_parquet_file(tmp_path: Path) -> None:
    (tmp_path / "input").mkdir()
    for name in ("a", "b"):
        pq.write_table(pa.table({"image": [b"x", b"y"], "key": ["0", "1"]}), tmp_path / "input" / f"{name}.parquet")
    assert names_of(find_input(str(tmp_path / "input")).units()) == [["0", "1"], ["0", "1"]]
    pq.write_table(pa.table({"image": [b"x", b"y"], "key": ["0", "0"]}), tmp_path / "input" / "b.parquet")
    with pytest.raises(DamagedInput, match=r"has the key '0', which occurs twice in unit .* Make keys unique"):
        names_of(find_input(str(tmp_path / "input")).units())


def test_rows_after_a_repeated_key_are_salvaged(tmp_path: Path) -> None:
    (tmp_path / "input").mkdir()
    rows = {"image": [b"a", b"b", b"c", b"d"], "key": ["0", "0", "1", "2"]}
    pq.write_table(pa.table(rows), tmp_path / "input" / "a.parquet")
    (unit,) = find_input(str(tmp_path / "input")).units()
    samples = read(unit, "salvage")
    assert [(sample.key, sample.image) for sample in samples] == [
        *(("0", b"a"), ("a.parquet#0/1", None), ("1", b"c"), ("2", b"d"))
    ]
    assert [sample.lost for sample in samples] == ["", "the key '0' occurs twice", "", ""]


def test_mds_in_folders_with_a_merged_index(tmp_path: Path) -> None:
    for name in ("a", "z"):
        as_mds(tmp_path / "input" / name, SAMPLES[:3])
    merge_index(str(tmp_path / "input"))
    samples = [sample for unit in find_input(str(tmp_path / "input")).units() for sample in read(unit)]
    assert [sample.image for sample in samples] == [image for image, _ in EXPECTED[:3]] * 2


def test_pixels_in_mds(tmp_path: Path) -> None:
    pictures = [
        Image.new(mode, (4, 4), color) for mode, color in (("RGB", (1, 2, 3)), ("CMYK", (9, 8, 7, 6)), ("L", 5))
    ]
    with MDSWriter(out=str(tmp_path / "input"), columns={"photo": "pil", "object": "pkl", "text": "str"}) as writer:
        for picture in pictures:
            writer.write({"photo": picture, "object": {1, 2}, "text": "a"})
    samples = [sample for unit in find_input(str(tmp_path / "input")).units() for sample in read(unit)]
    assert [list(Image.open(io.BytesIO(sample.image or b"")).getdata()) for sample in samples] == [
        list(picture.getdata()) for picture in pictures
    ]
    assert all(sample.metadata == {"text": "a"} for sample in samples)


def test_arrays_and_lists_of_images_in_mds_are_skipped(tmp_path: Path) -> None:
    """A unit can be retried and extended only if reading it twice yields the same SHA-256."""
    picture = Image.new("RGB", (8, 8))
    columns = {"image": "jpeg", "views": "list[jpeg]", "masks": "list[png]", "frames": "list[pil]", "vector": "ndarray"}
    columns |= {"mask": "png", "depth": "pil", "txt": "bytes"}
    scalars = {"__key__": "bytes", "text": "str", "boxes": "json", "score": "float16", "price": "str_float"}
    with MDSWriter(out=str(tmp_path / "input"), columns=columns | scalars) as writer:
        writer.write(
            {"image": picture, "views": [picture], "masks": [picture], "frames": [picture], "vector": np.arange(3)}
            | {"mask": picture, "depth": picture, "txt": b"a cat"}
            | {"__key__": b"caf\xc3\xa9", "text": "a", "boxes": [[0, 1]], "score": 0.5, "price": 1.25}
        )
    (unit,) = find_input(str(tmp_path / "input")).units()
    records = []
    for _ in range(2):
        with unit.open(LIMIT) as source:
            (sample,) = source.samples()
            records.append(source.record())
    assert sample.key == "café"
    assert sample.metadata == {"txt": b"a cat", "text": "a", "boxes": [[0, 1]], "score": 0.5, "price": 1.25}
    assert records[0] == records[1]


def test_compressed_mds(tmp_path: Path) -> None:
    as_mds(tmp_path / "input", SAMPLES, compression="zstd")
    samples = [sample for unit in find_input(str(tmp_path / "input")).units() for sample in read(unit)]
    assert [(sample.image, sample.metadata["caption"]) for sample in samples] == EXPECTED
