"""Reading tars: grouping of members, and detection of every kind of damage."""

import hashlib
import io
import os
import re
import tarfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from precompute.input import tars
from precompute.input.find import choose_caption_fields, find_input
from precompute.input.tars import Tar, counted_samples
from precompute.input.unit import MAX_JSON_BYTES, RawSample
from shards.base.errors import DamagedInput, RequestError
from shards.base.remote import RemoteStore
from shards.base.store import LocalStore
from tests.tiny import make_samples, make_tar

LIMIT = 1 << 20


@pytest.fixture
def tar(tmp_path: Path) -> Path:
    return make_tar(tmp_path / "tars", "00007", make_samples(7, 6, [(64, 64)]))


def read(path: Path, limit: int = LIMIT) -> list[str]:
    return [sample.key for sample in Tar(path, limit).samples()]


def test_members_are_grouped_in_order(tar: Path) -> None:
    opened = Tar(tar, LIMIT)
    samples = list(opened.samples())
    assert [sample.key for sample in samples] == [f"00007{i:04d}" for i in range(6)]
    assert samples[2].caption == b"picture 000070002 of 2 blobs"
    assert samples[2].image is not None and samples[2].metadata["url"] == "http://example.org/000070002"


def test_an_image_may_be_larger_than_a_json_but_a_json_that_large_is_not_read(tmp_path: Path) -> None:
    large = b"x" * (MAX_JSON_BYTES + 1)
    path = make_tar(tmp_path, "00000", [("a", {"jpg": large, "json": b'{"url": "%b"}' % large})])
    (sample,) = Tar(path, 2 * MAX_JSON_BYTES).samples()
    assert sample.image == large and sample.metadata == {}


def test_other_members_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A video beside an image may exceed the limit; only the hash of the tar covers it."""
    members = {
        "000.cls": b"7",
        "000.jpg": b"image",
        "000.mp4": bytes(2000),
        "000.seg.png": b"mask",
        "000.txt": b"a cat",
    }
    folder = tmp_path / "input"
    folder.mkdir()
    path = write_tar(folder / "00000.tar", members)
    read_sizes: list[int] = []

    def pread(file: int, size: int, offset: int) -> bytes:
        read_sizes.append(size)
        return os.pread(file, size, offset)

    monkeypatch.setattr(tars, "os", SimpleNamespace(pread=pread))
    (unit,) = find_input(str(folder)).units()
    with unit.open(1000) as source:
        (sample,) = source.samples()
        record = source.record()
    assert sample == RawSample("000", b"image", b"a cat")
    assert sorted(read_sizes) == [5, 5]
    assert record["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()


def test_captions_are_found_behind_a_large_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first bytes of the tar, which are read to find the captions, do not contain a whole sample."""
    monkeypatch.setattr(tars, "HEAD_BYTES", 10_000)
    samples = [(str(number), {"jpg": b"x" * 20_000, "txt": b"a caption"}) for number in range(3)]
    make_tar(tmp_path / "input", "00000", samples)
    assert choose_caption_fields(find_input(str(tmp_path / "input")), LIMIT) == ["txt"]


@pytest.mark.parametrize(
    ("suffixes", "caption"),
    [(["caption"], b"caption"), (["caption", "txt"], b"txt"), (["txt", "caption"], b"txt")],
)
def test_a_caption_is_in_either_text_file_as_in_a_folder(suffixes: list[str], caption: bytes, tmp_path: Path) -> None:
    members = {f"000.{suffix}": suffix.encode() for suffix in suffixes}
    path = write_tar(tmp_path / "00000.tar", {"000.jpg": b"x", "000.json": b"{}"} | members)
    path.write_bytes(path.read_bytes() + b"damage" * 512)
    (sample,) = Tar(path, LIMIT, "salvage").samples()
    assert (sample.caption, sample.lost) == (caption, "")


def test_a_caption_file_does_not_replace_a_lost_text_file(tmp_path: Path) -> None:
    members = {f"{key}.{suffix}": b"{}" for key in ("000", "001") for suffix in ("caption", "jpg", "json", "txt")}
    path = write_tar(tmp_path / "00000.tar", members)
    data = bytearray(path.read_bytes())
    place = data.index(b"001.txt")
    data[place : place + 512] = b"damage" * 85 + b"!!"
    path.write_bytes(data)
    samples = list(Tar(path, LIMIT, "salvage").samples())
    assert [(sample.key, bool(sample.lost)) for sample in samples] == [("000", False), ("001", True)]


@pytest.mark.parametrize("columns", [{"key": ["000070000"]}, {"status": ["success"]}, {"vector": [[0.5]]}])
def test_a_parquet_file_of_another_program_is_no_side_file(columns: dict[str, list[object]], tar: Path) -> None:
    (tar.parent / "00007_stats.json").unlink()
    assert not find_input(str(tar.parent)).notes
    pq.write_table(pa.table(columns), tar.parent / "00007.parquet")
    found = find_input(str(tar.parent))
    assert found.notes[0].startswith("1 of 1 tars have no NNNNN_stats.json or NNNNN.parquet from img2dataset")
    (unit,) = found.units()
    with unit.open(LIMIT) as source:
        assert len(list(source.samples())) == 6


def test_counts_come_from_both_side_files(tar: Path) -> None:
    store = LocalStore(tar.parent)
    counted = counted_samples(store, "00007")
    assert counted.counts == {"00007_stats.json": 6, "00007.parquet": 6}
    Tar(tar, LIMIT).check(store, "00007")
    del (opened := Tar(tar, LIMIT)).members["000070003"]
    with pytest.raises(DamagedInput, match=r"contains 5 samples, but 00007_stats\.json lists 6"):
        opened.check(store, "00007")


def test_side_files_may_be_missing_from_a_cached_file_system(tar: Path) -> None:
    (tar.parent / "00007_stats.json").unlink()
    store = RemoteStore(f"simplecache::file://{tar.parent}")
    assert counted_samples(store, "00007").counts == {"00007.parquet": 6}
    assert counted_samples(store, "00008").counts == {}


def test_a_tar_that_was_removed_since_it_was_listed_is_named(tar: Path) -> None:
    found = find_input(str(tar.parent))
    tar.unlink()
    with pytest.raises(RequestError, match=r"00007\.tar cannot be read: No such file .* If it was removed, run"):
        list(found.heads(LIMIT))


def test_a_flipped_bit_in_any_header_is_found(tar: Path) -> None:
    """Flip every header byte that the checksum covers, in a member in the middle."""
    data = bytearray(tar.read_bytes())
    header = data.index(b"000070003.jpg")
    for offset in [0, 5, 100, 124, 130, 148, 156, 257]:
        flipped = data.copy()
        flipped[header + offset] ^= 1
        tar.write_bytes(flipped)
        with pytest.raises(DamagedInput, match=r"damaged|cannot be decompressed"):
            read(tar)


def test_truncation_at_any_block_is_found(tar: Path) -> None:
    data = tar.read_bytes()
    content_end = len(data.rstrip(b"\0"))
    for length in [*range(0, content_end, 512), content_end + 100]:
        tar.write_bytes(data[:length])
        with pytest.raises(DamagedInput, match=r"truncated|damaged|cannot be decompressed"):
            read(tar)


def test_listing(tar: Path) -> None:
    assert [shard.name for shard in find_input(str(tar.parent)).units()] == ["00007"]
    for name in (".00008.tar", "._00007.tar"):  # hidden files are not tars
        (tar.parent / name).write_bytes(b"")
    assert [shard.name for shard in find_input(f"file://{tar.parent}").units()] == ["00007"]


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            header = tarfile.TarInfo(name)
            header.size = len(data)
            tar.addfile(header, io.BytesIO(data))
    return path


@pytest.mark.parametrize("kind", [b"L", b"K", b"x", b"g"])
@pytest.mark.parametrize("size", [(1 << 20) + 1, 1 << 40, 1 << 62])
def test_an_extended_header_that_would_fill_the_memory_is_damage(tar: Path, kind: bytes, size: int) -> None:
    header = tarfile.TarInfo("././@LongLink")
    header.type, header.size = kind, size
    tar.write_bytes(header.tobuf(tarfile.GNU_FORMAT) + tar.read_bytes())
    with pytest.raises(DamagedInput, match="damaged"):
        Tar(tar, LIMIT)
    assert len(Tar(tar, LIMIT, "salvage").members) == 6


def test_the_largest_extended_header_is_read(tmp_path: Path) -> None:
    folder = "x" * ((1 << 20) - len("1048576 path=/000.jpg\n"))
    assert read(write_tar(tmp_path / "00000.tar", {f"{folder}/000.jpg": b""})) == ["000"]


@pytest.mark.parametrize(("place", "field"), [(482, b"\1"), (124, (-512).to_bytes(12, signed=True))])
def test_a_sparse_header_that_ends_after_the_tar_or_before_itself_is_damage(
    place: int, field: bytes, tmp_path: Path
) -> None:
    header = tarfile.TarInfo("000.jpg")
    header.type = tarfile.GNUTYPE_SPARSE
    block = bytearray(header.tobuf(tarfile.GNU_FORMAT))
    block[place : place + len(field)] = field
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    (tmp_path / "00000.tar").write_bytes(tarfile.TarInfo("000.txt").tobuf() + block)
    with pytest.raises(DamagedInput, match=r"damaged|truncated"):
        Tar(tmp_path / "00000.tar", LIMIT)


def test_two_images_with_one_key_are_ambiguous(tmp_path: Path) -> None:
    members = {"000.jpg": b"photo", "000.png": b"mask", "000.txt": b"a photo", "001.jpg": b"x", "001.txt": b"y"}
    path = write_tar(tmp_path / "00000.tar", members)
    with pytest.raises(DamagedInput, match="the key 000 occurs twice"):
        Tar(path, LIMIT)
    salvaged = Tar(path, LIMIT, "salvage")
    assert list(salvaged.members) == ["001"] and list(salvaged.lost) == ["000"]


def test_members_without_a_key_and_folders_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "00000.tar"
    with tarfile.open(path, "w") as tar:
        for name in ("._BZh4x.jpg", "BZh4x.jpg", "folder", "._BZh4x.txt", "BZh4x.txt"):
            header = tarfile.TarInfo(name)
            header.type = tarfile.DIRTYPE if name == "folder" else tarfile.REGTYPE
            tar.addfile(header)
    path.write_bytes(path.read_bytes()[512:])  # the name in the first header starts like a bzip2 file
    (sample,) = Tar(path, LIMIT).samples()
    assert (sample.key, sample.image, sample.caption) == ("BZh4x", b"", b"")


def test_a_bit_of_a_side_file_is_damage_or_nothing(tar: Path) -> None:
    """It never raises an error that would be mistaken for a storage failure or a bug."""
    store, random, refused = LocalStore(tar.parent), np.random.default_rng(0), 0
    for name in ("00007.parquet", "00007_stats.json"):
        path = tar.parent / name
        data = path.read_bytes()
        for offset in range(0, len(data), 3):
            flipped = bytearray(data)
            flipped[offset] ^= 1 << int(random.integers(8))
            path.write_bytes(flipped)
            try:
                counted_samples(store, "00007")
            except DamagedInput:
                refused += 1
        path.write_bytes(data)
    assert refused > 50


@pytest.mark.parametrize(
    "stats", ['{"successes": 1e400}', '{"successes": Infinity}', "[" * 100_000, '{"successes": []}']
)
def test_odd_counts_are_damage(tar: Path, stats: str) -> None:
    (tar.parent / "00007_stats.json").write_text(stats)
    with pytest.raises(DamagedInput, match=r"00007_stats\.json is damaged"):
        counted_samples(LocalStore(tar.parent), "00007")


def test_a_parquet_of_too_many_rows_is_not_read(tar: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tars, "MAX_ROWS", 5)
    with pytest.raises(DamagedInput, match="6 rows, more than the limit of 5"):
        counted_samples(LocalStore(tar.parent), "00007")
    monkeypatch.setattr(tars, "MAX_ROWS", 6)
    assert counted_samples(LocalStore(tar.parent), "00007").counts["00007.parquet"] == 6


def of_names(*names: str) -> dict[str, bytes]:
    return {name: name.encode() for name in names}


@pytest.mark.parametrize(
    ("names", "samples"),
    [
        (["key.with.dots.jpg", "key.with.dots.txt"], {"key.with.dots": (b"key.with.dots.jpg", b"key.with.dots.txt")}),
        (
            ["v1.0.JPG", "v1.0.txt", "v1.1.jpg", "v1.1.txt"],
            {"v1.0": (b"v1.0.JPG", b"v1.0.txt"), "v1.1": (b"v1.1.jpg", b"v1.1.txt")},
        ),
        (["a.jpg", "a.seg.png", "a.txt"], {"a": (b"a.jpg", b"a.txt")}),  # as in webdataset
        (["a.jpg", "a.json", "a.seg.json", "a.seg.png", "a.txt"], {"a": (b"a.jpg", b"a.txt")}),
        (["d.e/a.seg.png", "d.e/a.jpg", "d.e/a.txt"], {"a": (b"d.e/a.jpg", b"d.e/a.txt")}),
        (["a.rgb.png", "a.txt"], {"a": (None, b"a.txt")}),  # as in webdataset, without an image of a known suffix
    ],
)
def test_keys_with_dots(names: list[str], samples: dict[str, tuple[bytes | None, bytes]], tmp_path: Path) -> None:
    found = {
        sample.key: (sample.image, sample.caption)
        for sample in Tar(write_tar(tmp_path / "a.tar", of_names(*names)), LIMIT).samples()
    }
    assert found == samples


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a.b.jpg", "a.b.png", "a.b.txt"], r"the key a\.b occurs twice.* a unique key"),
        (
            ["a.1.jpg", "a.1.txt", "a.jpg", "a.txt"],
            r"ambiguous: a\.1\.jpg, a\.1\.txt may be the sample a\.1, or further files of the sample a\. "
            r"Recreate it with keys without dots",
        ),
        (["a.jpg", "a.json", "a.B.jpg", "a.B.json"], r"may be the sample a\.B, or further files of the sample a\."),
        (["a.jpg", "b.jpg", "a.txt", "b.txt"], r"is not in order: the members of the key a.* tar --sort=name"),
    ],
)
def test_ambiguous_members_are_refused(names: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(DamagedInput, match=message):
        Tar(write_tar(tmp_path / "a.tar", of_names(*names)), LIMIT)


def test_damage_next_to_keys_with_dots(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", of_names("v1.0.jpg", "v1.0.txt", "v1.0.json", "v1.1.jpg", "v1.1.txt"))
    path.write_bytes(path.read_bytes()[: 9 * 512])  # without the last member's data
    salvaged = Tar(path, LIMIT, "salvage")
    assert list(salvaged.members) == ["v1.0"] and list(salvaged.lost) == ["v1.1"]
    salvaged = Tar(write_tar(path, of_names("a/v1.0.jpg", "b/v1.0.jpg", "v1.0.txt")), LIMIT, "salvage")
    assert not salvaged.members and list(salvaged.lost) == ["v1.0"]


def test_an_ambiguous_sample_is_accounted_for(tmp_path: Path) -> None:
    names = of_names("a.1.jpg", "a.1.txt", "a.2.jpg", "a.jpg", "a.txt")
    salvaged = Tar(write_tar(tmp_path / "a.tar", names), LIMIT, "salvage")
    assert [(sample.key, sample.image, sample.lost) for sample in salvaged.samples()] == [
        ("a", b"a.jpg", ""),
        ("a.1", None, "its files may belong to the sample a"),
    ]
    assert salvaged.record()["lost"] == 1


@pytest.mark.parametrize("num_keys", [5, 6])
def test_a_record_lists_five_kinds_of_damage_at_most(num_keys: int, tmp_path: Path) -> None:
    names = [f"{key}.{suffix}" for key in range(num_keys) for suffix in ("jpg", "png")]
    record = Tar(write_tar(tmp_path / "a.tar", of_names(*names)), LIMIT, "salvage").record()
    assert (record["lost"], record["lost_unnamed"]) == (num_keys, 0)
    damage = str(record["damage"])
    assert damage.count("occurs twice") == 5 and damage.endswith("…") == (num_keys > 5)


@pytest.mark.parametrize("data", [b"{", b"[1]", b'{"url": "u", "a": [' + b"[]," * (1 << 19) + b"1]}"], ids=range(3))
def test_invalid_or_huge_json_costs_only_the_metadata(data: bytes, tmp_path: Path) -> None:
    path = write_tar(tmp_path / "00000.tar", {"000.jpg": b"x", "000.txt": b"y", "000.json": data})
    (sample,) = Tar(path, 64 << 20).samples()
    assert sample.metadata == {} and not sample.oversized and sample.caption == b"y"


KINDS: dict[str, dict[str, object]] = {
    "hard link": {"type": tarfile.LNKTYPE, "linkname": "b.jpg"},
    "symbolic link": {"type": tarfile.SYMTYPE, "linkname": "b.jpg"},
    "sparse": {"type": tarfile.GNUTYPE_SPARSE},
    "sparse in pax": {"pax_headers": {"GNU.sparse.map": "0,0", "GNU.sparse.size": "0"}},
}
"""Members that GNU tar writes for linked files, and with `--sparse`."""


def with_links(path: Path, names: list[str], kind: str, plain: tuple[str, ...] = ("b.jpg", "b.txt")) -> Path:
    """Make a tar of the files `names`, which it stores as members of this kind, followed by plain files."""
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for name in names:
            header = tarfile.TarInfo(name)
            for field, value in KINDS[kind].items():
                setattr(header, field, value)
            tar.addfile(header)
        for name in plain:
            header = tarfile.TarInfo(name)
            header.size = len(name)
            tar.addfile(header, io.BytesIO(name.encode()))
    return path


@pytest.mark.parametrize("name", ["a.jpg", "a.txt", "a.caption", "a.json", "v1.0.jpg"])
@pytest.mark.parametrize("kind", KINDS)
def test_links_and_sparse_files_are_not_read_but_counted(kind: str, name: str, tmp_path: Path) -> None:
    key = name.rpartition(".")[0]
    rest = (f"{key}.{'txt' if name.endswith('jpg') else 'jpg'}", "b.jpg", "b.txt")
    path = with_links(tmp_path / "00000.tar", [name], kind, rest)
    message = (
        rf"00000\.tar stores 1 file as links or sparse files, which are not read, starting with '{re.escape(name)}'\. "
        r"Recreate it with tar --dereference --hard-dereference, and without --sparse"
    )
    with pytest.raises(DamagedInput, match=message):
        Tar(path, LIMIT)
    tar = Tar(path, LIMIT, "salvage")
    tar.check(LocalStore(tmp_path), "00000")
    assert list(tar.samples()) == [
        RawSample("b", b"b.jpg", b"b.txt"),
        RawSample(key, metadata={"url": ""}, lost="one of its files is a link or a sparse file"),
    ]
    assert (tar.record()["lost"], tar.record()["lost_unnamed"]) == (1, 0)


def test_a_tar_of_nothing_but_links_says_how_to_recreate_it(tmp_path: Path) -> None:
    path = with_links(tmp_path / "input" / "00000.tar", ["a.jpg", "a.txt"], "symbolic link", ())
    with pytest.raises(RequestError, match=r"stores 2 files as links .* Recreate it with tar --dereference"):
        choose_caption_fields(find_input(str(path.parent)), LIMIT)
    with pytest.raises(DamagedInput, match=r"no intact sample is left.*Recreate it with tar --dereference"):
        Tar(path, LIMIT, "salvage").check(LocalStore(path.parent), "00000")


@pytest.mark.parametrize("kind", KINDS)
def test_links_and_sparse_files_that_no_sample_uses_are_ignored(kind: str, tmp_path: Path) -> None:
    path = with_links(tmp_path / "00000.tar", ["README", "a.mp4", "._b.jpg", "b.seg.png"], kind)
    assert list(Tar(path, LIMIT).samples()) == [RawSample("b", b"b.jpg", b"b.txt")]
