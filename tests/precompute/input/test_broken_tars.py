"""Every class of broken tar, under both policies."""

import bz2
import gzip
import io
import json
import lzma
import random
import re
import tarfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from precompute.config import PrecomputeConfig
from precompute.input.find import find_input
from precompute.input.tars import Tar
from precompute.input.unit import InputConfig, RawSample
from shards.base.errors import DamagedInput
from shards.base.store import LocalStore
from shards.open import open_store
from shards.root.committed import TarReceipts
from shards.tools.verify import verify_root
from tests.fixtures import encode_all, folder_of, precompute_config
from tests.roots import load_tars, rejects, rows
from tests.tiny import make_samples, make_tar

LIMIT = 1 << 20
KEYS = [f"00000{i:04d}" for i in range(8)]


def sound() -> list[tuple[str, str, bytes]]:
    """Return (key, suffix, bytes) of the members of eight intact samples."""
    samples = make_samples(0, 8, [(80, 64)])
    return [(key, suffix, data) for key, members in samples for suffix, data in members.items()]


def tar_of(folder: Path, members: list[tuple[str, str, bytes]]) -> Path:
    """Make a tar of these members in this order, with the sidecar files of eight samples."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(folder / "00000.tar", "w") as tar:
        for key, suffix, data in members:
            (header := tarfile.TarInfo(f"{key}.{suffix}")).size = len(data)
            tar.addfile(header, io.BytesIO(data))
    (folder / "00000_stats.json").write_text(json.dumps({"count": 9, "successes": 8}))
    rows = {
        "key": [*KEYS, "000009999"],
        "url": [f"http://example.org/{key}" for key in KEYS] + ["http://example.org/gone"],
        "status": ["success"] * 8 + ["failed_to_download"],
    }
    pq.write_table(pa.table(rows), folder / "00000.parquet")
    return folder / "00000.tar"


def changed(change: Callable[[bytearray], bytes | bytearray]) -> Callable[[Path], None]:
    """Return a function that breaks a tar by changing its bytes."""

    def break_it(folder: Path) -> None:
        path = tar_of(folder, sound())
        path.write_bytes(change(bytearray(path.read_bytes())))

    return break_it


def reordered(change: Callable[[list[tuple[str, str, bytes]]], list[tuple[str, str, bytes]]]) -> Callable[[Path], None]:
    """Return a function that breaks a tar by changing its members."""
    return lambda folder: (tar_of(folder, change(sound())), None)[1]


def flip(data: bytearray, name: bytes, offset: int = 20) -> bytearray:
    """Flip one bit of the header of the member `name`, or of the data after it."""
    data[data.index(name) + offset] ^= 1
    return data


def without(*parts: str) -> Callable[[list[tuple[str, str, bytes]]], list[tuple[str, str, bytes]]]:
    """Drop the members whose key.suffix is among `parts`."""
    return lambda members: [member for member in members if f"{member[0]}.{member[1]}" not in parts]


def negative_size(data: bytearray) -> bytearray:
    """Set a negative size, in base 256, in an otherwise valid header, which makes tarfile loop."""
    place = data.index(b"000000003.jpg")
    data[place + 124 : place + 136] = b"\xff" * 12
    data[place + 148 : place + 156] = b" " * 8
    data[place + 148 : place + 156] = b"%06o\0 " % sum(data[place : place + 512])
    return data


def long_name() -> bytes:
    """Return a GNU header with the long name of the next member, and that name."""
    header = tarfile.TarInfo("././@LongLink")
    header.type, header.size = tarfile.GNUTYPE_LONGNAME, 512
    return header.tobuf(tarfile.GNU_FORMAT) + b"n" * 511 + b"\0"


def flip_after_long_name(data: bytearray) -> bytearray:
    """Insert a long name before a member, and flip a bit of that member's header, at which tarfile raises an error."""
    place = data.index(b"000000003.jpg")
    return flip(data[:place] + long_name() + data[place:], b"000000003.jpg")


# the class, its cause, the reason for the refusal, and the keys that salvaging loses
BROKEN: dict[str, tuple[Callable[[Path], None], str, list[int]]] = {
    "cut at a header": (changed(lambda d: d[: d.index(b"000000005.jpg")]), "truncated", [5, 6, 7]),
    "cut within a sample": (changed(lambda d: d[: d.index(b"000000005.txt")]), "truncated", [5, 6, 7]),
    "cut within a member": (changed(lambda d: d[: d.index(b"000000005.jpg") + 700]), "truncated", [5, 6, 7]),
    "cut within a later member": (changed(lambda d: d[: d.index(b"000000005.json") + 600]), "truncated", [5, 6, 7]),
    "cut within a header": (changed(lambda d: d[: d.index(b"000000005.jpg") + 99]), "damaged", [5, 6, 7]),
    "without its end": (changed(lambda d: d.rstrip(b"\0") + bytes(-len(d.rstrip(b"\0")) % 512)), "truncated", []),
    "a bit of a header": (changed(lambda d: flip(d, b"000000003.txt")), "damaged", [3]),
    "a bit of a first header": (changed(lambda d: flip(d, b"000000000.jpg")), "damaged", [0]),
    "a bit of a header after a long name": (changed(flip_after_long_name), "damaged", [3]),
    "a bit of a name": (changed(lambda d: flip(d, b"000000003.jpg", 3)), "damaged", [3]),
    "a bit of a size": (changed(lambda d: flip(d, b"000000003.jpg", 130)), "damaged", [3]),
    "a size below zero": (changed(negative_size), "damaged", [3]),
    "a block of zeros within": (
        changed(lambda d: d[: d.index(b"000000003.jpg")] + bytes(1024) + d[d.index(b"000000003.jpg") :]),
        "damaged",
        [],
    ),
    "a key twice": (reordered(lambda m: m + m[:3]), "occurs twice", [0]),
    "a key twice, side by side": (reordered(lambda m: m[:3] + m[:3] + m[3:]), "occurs twice", [0]),
    "members out of order": (reordered(lambda m: m[::3] + m[1::3] + m[2::3]), "not in order", []),
    "samples out of order": (reordered(lambda m: m[12:] + m[:12]), "", []),
    "a sample missing": (reordered(lambda m: m[:9] + m[12:]), "contains 7 samples, but 00000_stats.json", [3]),
    "a foreign sample": (
        reordered(lambda m: [*m[:9], *(("x", *member[1:]) for member in m[9:12]), *m[12:]]),
        "parquet file does not list",
        [3],
    ),
    "random bytes": (changed(lambda d: random.Random(0).randbytes(len(d))), "damaged", KEYS),  # type: ignore[dict-item]
    "empty": (changed(lambda d: b""), "truncated", KEYS),  # type: ignore[dict-item]
    "an HTML page": (changed(lambda d: b"<html>" * 1000), "damaged", KEYS),  # type: ignore[dict-item]
}


def read(folder: Path, policy: str) -> tuple[Tar, list[RawSample]]:
    """Read the tar's samples, and compare them with its sidecar files."""
    tar = Tar(folder / "00000.tar", LIMIT, policy)  # type: ignore[arg-type]
    tar.check(LocalStore(folder), "00000")
    return tar, list(tar.samples())


@pytest.mark.parametrize("name", BROKEN)
def test_each_class(name: str, tmp_path: Path) -> None:
    break_it, message, lost = BROKEN[name]
    break_it(tmp_path)
    if not message:  # no damage, because the order of the parquet file does not matter
        assert len(read(tmp_path, "reject")[1]) == 8
        return
    with pytest.raises(DamagedInput, match=message):
        read(tmp_path, "reject")
    if lost == KEYS:
        with pytest.raises(DamagedInput, match="no intact sample is left"):
            read(tmp_path, "salvage")
        return
    tar, samples = read(tmp_path, "salvage")
    assert sorted(sample.key for sample in samples) == KEYS  # every sample that img2dataset counted, once
    assert {sample.key for sample in samples if sample.lost} == {KEYS[i] for i in lost}
    whole = {(key, suffix): data for key, suffix, data in sound()}
    for sample in samples:
        if not sample.lost:
            assert (sample.image, sample.caption) == (whole[sample.key, "jpg"], whole[sample.key, "txt"])
            assert sample.metadata["key"] == sample.key
    record = tar.record()
    assert record["lost"] == len(lost) and record["lost_unnamed"] == 0 and message in str(record["damage"])


@pytest.mark.parametrize("policy", ["reject", "salvage"])
def test_one_in_a_compression_that_cannot_be_read_is_refused_under_both(policy: str, tmp_path: Path) -> None:
    path = tar_of(tmp_path, sound())
    path.write_bytes(lzma.compress(path.read_bytes()))
    found = find_input(str(tmp_path))
    (unit,) = found.units()
    message = rf"^{path} is compressed with xz\. Decompress it"
    with pytest.raises(DamagedInput, match=message), unit.open(LIMIT, policy):  # type: ignore[arg-type]
        pass
    with pytest.raises(DamagedInput, match=message):  # from a copy of the tar's start
        next(found.heads(LIMIT))


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress])
def test_compression_is_detected_whatever_the_name(compress: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = tar_of(tmp_path, sound())
    path.write_bytes(compress(path.read_bytes()))
    (unit,) = find_input(str(tmp_path)).units()
    with unit.open(LIMIT) as source:
        assert [sample.key for sample in source.samples()] == KEYS


@pytest.mark.parametrize("parquet", [True, False])
def test_losses_without_names(tmp_path: Path, parquet: bool) -> None:
    """Without the parquet file, the stats give only the number of missing samples."""
    reordered(lambda members: members[:9] + members[12:])(tmp_path)
    if not parquet:
        (tmp_path / "00000.parquet").unlink()
    tar, samples = read(tmp_path, "salvage")
    record = tar.record()
    assert (record["lost"], record["lost_unnamed"]) == ((1, 0) if parquet else (0, 1))
    assert len(samples) == 7 + parquet


@pytest.mark.parametrize("file", ["00000_stats.json", "00000.parquet"])
def test_a_damaged_side_file_is_named(tmp_path: Path, file: str) -> None:
    tar_of(tmp_path, sound())
    (tmp_path / file).write_bytes((tmp_path / file).read_bytes()[:-9])
    with pytest.raises(DamagedInput, match=rf"{file} is damaged"):
        read(tmp_path, "salvage")


def test_nothing_is_followed_or_extracted(tmp_path: Path) -> None:
    """Add links, folders, devices, sparse files and odd names to eight intact samples, some with long (pax) names."""
    secret = tmp_path / "secret"
    secret.write_text("secret")
    path = tar_of(tmp_path / "tars", [])
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "global"}) as tar:
        kinds = (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE)
        for i, kind in enumerate((*kinds, tarfile.GNUTYPE_SPARSE)):
            odd = tarfile.TarInfo(f"odd{i}.jpg")
            odd.type, odd.linkname = kind, str(secret)
            tar.addfile(odd)
        places = ["", "/", "../../", "a/b/../", "/etc/" + "d" * 200 + "/", "ü/", "./", "//"]
        for i, (key, suffix, data) in enumerate(sound()):
            member = tarfile.TarInfo(f"{places[i // 3]}{key}.{suffix}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
        for name in (".hidden.jpg", "..", "/"):
            tar.addfile(tarfile.TarInfo(name))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(DamagedInput, match=r"stores 3 files as links or sparse files, .* starting with 'odd0\.jpg'"):
        read(tmp_path / "tars", "reject")
    samples = read(tmp_path / "tars", "salvage")[1]
    assert [sample.key for sample in samples] == KEYS and all(sample.image for sample in samples)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_name_that_is_no_text_becomes_one(tmp_path: Path) -> None:
    path = tmp_path / "00000.tar"
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT, encoding="utf-8", errors="surrogateescape") as tar:
        tar.addfile(tarfile.TarInfo(b"bad\xff.jpg".decode("utf-8", "surrogateescape")))
    (sample,) = Tar(path, LIMIT).samples()
    assert sample.key == "bad\\udcff"


def test_a_thousand_headers_before_one_file_are_no_way_in(tmp_path: Path) -> None:
    """Extended headers nest in tarfile; the recursion limit must not look like a bug."""
    path = tar_of(tmp_path, sound())
    path.write_bytes(long_name() * 3000 + path.read_bytes())
    for policy in ("reject", "salvage"):
        with pytest.raises(DamagedInput, match="nested too deeply"):
            read(tmp_path, policy)


def config_with(models: Path, folder: Path, root: Path, **tars: object) -> PrecomputeConfig:
    """Make the config of stage 1 on the tars in `folder`."""
    config = precompute_config(models, folder, root, buckets=["64x64"])
    return config.model_copy(update={"tars": InputConfig.model_validate(tars)})


def salvaged(models: Path, folder: Path, **changes: object) -> tuple[Path, TarReceipts]:
    """Run stage 1 on the tars in `folder` with `salvage`; return the root and the receipt."""
    config = config_with(models, folder, folder / "root", policy="salvage", **changes)
    encode_all(config)
    assert list(verify_root(open_store(config.output))) == []
    return folder_of(config), load_tars(open_store(config.output))[0]


def test_a_salvaged_shard_accounts_for_every_sample(models: Path, tmp_path: Path) -> None:
    BROKEN["a bit of a header"][0](tmp_path)
    root, receipt = salvaged(models, tmp_path)
    assert (receipt.samples_in, receipt.encoded, receipt.rejected) == (8, 7, {"lost_in_tar": 1})
    assert (receipt.parts["64x64"].input["lost"], receipt.parts["64x64"].input["lost_unnamed"]) == (1, 0)
    assert [(row["key"], row["url"], row["reason"]) for row in rejects(root, "00000")] == [
        (KEYS[3], f"http://example.org/{KEYS[3]}", "lost_in_tar")
    ]
    assert [row["key"] for row in rows(root, "64x64")] == [*KEYS[:3], *KEYS[4:]]


def test_a_bit_of_a_picture(models: Path, tmp_path: Path) -> None:
    """The tar itself does not reveal it, but the SHA-256 that img2dataset recorded at the download does, whatever the
    case of its letters."""

    def change(data: bytearray) -> bytearray:
        upper = bytearray(re.sub(rb'(?<="sha256": ")[0-9a-f]{64}', lambda found: found[0].upper(), data))
        assert upper != data
        return flip(upper, b"000000003.jpg", 512 + 300)

    changed(change)(tmp_path)
    config = config_with(models, tmp_path, tmp_path / "rejected", check_sha256=True)
    with pytest.raises(
        DamagedInput, match=r"The image of sample 000000003 does not match the sha256 that its JSON records"
    ):
        encode_all(config)
    assert load_tars(open_store(config.output)) == []
    _, receipt = salvaged(models, tmp_path, check_sha256=True)
    assert (receipt.encoded, receipt.rejected) == (7, {"lost_in_tar": 1})


def test_a_member_over_the_limit_costs_its_sample(tmp_path: Path) -> None:
    make_tar(tmp_path, "00000", [("a", {"jpg": b"x" * 2000, "txt": b"y"}), ("b", {"jpg": b"x" * 1000, "txt": b"y"})])
    tar = Tar(tmp_path / "00000.tar", 1000)
    tar.check(LocalStore(tmp_path), "00000")
    large, small = tar.samples()
    assert ".jpg has " in large.oversized and large.image is None and not small.oversized
