"""Contact sheets show the encoded images again, with their captions."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageChops, ImageDraw

from examples.shapes.encoders.vae import draw_pictures
from examples.shapes.models import MODELS
from precompute.lettering import Lettering
from precompute.preview import (
    contact_sheet,
    decode_pictures,
    fair_shares,
    load_decoder,
    pick_samples,
    run,
    wrapped,
)
from shards.base.errors import RequestError
from shards.format.encoding import EncodingRecord
from shards.open import open_store
from shards.root.committed import load_receipts
from tests.conftest import encode_all, folder_of, precompute_config
from tests.random_roots import random_root
from tests.tiny import make_tar


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve images of the demo's dataset in two tars, encoded with the demo's VAE."""
    folder = tmp_path_factory.mktemp("preview")
    pictures = ((draw_pictures(12, 64, seed=9) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()
    for shard in range(2):
        samples = []
        for i in range(6 * shard, 6 * shard + 6):
            Image.fromarray(pictures[i]).save(folder / "picture.png")
            data = {"jpg": (folder / "picture.png").read_bytes(), "txt": f"number {i}".encode()}
            samples.append((f"{shard:05d}{i:04d}", data))
        make_tar(folder / "tars", f"{shard:05d}", samples)
    config = precompute_config(MODELS, folder / "tars", folder / "root", buckets=["64x64"])
    encode_all(config, MODELS)
    np.save(folder / "pictures.npy", pictures)
    return folder_of(config)


def test_the_decoded_images_are_those_encoded(root: Path) -> None:
    encoding = EncodingRecord.load(open_store(root))
    _, samples = pick_samples(open_store(root), "64x64", 12)
    assert [sample["caption"] for sample in samples] == [f"number {i}" for i in range(12)]
    decoded = np.stack([np.asarray(p) for p in decode_pictures(samples, encoding, load_decoder(encoding, None))])
    error = decoded.astype(float) - np.load(root.parent / "pictures.npy")
    assert 20 * np.log10(255 / np.sqrt((error**2).mean())) > 25  # dB


def test_samples_are_from_all_parts(root: Path) -> None:
    store = open_store(root)
    assert [sample["key"][:5] for sample in pick_samples(store, "64x64", 4)[1]] == [
        "00000",
        "00000",
        "00001",
        "00001",
    ]
    assert len(pick_samples(store, "64x64", 100)[1]) == 12


def test_the_command(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run([str(root), "--samples", "5", "--output", str(tmp_path / "sheet.png")])
    assert "5 samples from bucket 64x64" in capsys.readouterr().out
    sheet = np.asarray(Image.open(tmp_path / "sheet.png"))
    # three columns of 256 px, two rows; the sixth cell stays white
    assert sheet.shape[1] == 3 * 264 + 8 and (sheet[-100:, -264:] == 255).all() and (sheet[-340:-100, :264] < 255).any()


def test_a_different_vae_is_refused(root: Path, models: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"did not produce these latents; according to encoding\.json"):
        run([str(root), "--vae", str(models / "vae"), "--output", str(tmp_path / "sheet.png")])
    shutil.copytree(MODELS / "vae", tmp_path / "moved")
    run([str(root), "--vae", str(tmp_path / "moved"), "--output", str(tmp_path / "sheet.png"), "--samples", "1"])


def test_a_missing_bucket(root: Path) -> None:
    with pytest.raises(RequestError, match="has no samples in bucket 512x512"):
        run([str(root), "--bucket", "512x512"])


@pytest.mark.parametrize("seed", range(3))
def test_as_many_samples_as_asked_for_or_all(tmp_path: Path, seed: int) -> None:
    """For any number of parts of any size, including empty ones."""
    store = open_store(random_root(tmp_path / "root", seed))
    receipts = [receipt for receipt in load_receipts(store) if receipt.bucket == "64x64"]
    total = sum(receipt.samples for receipt in receipts)
    for count in range(1, total + 3):
        bucket, samples = pick_samples(store, "64x64", count)
        keys = [sample["key"] for sample in samples]
        assert bucket == "64x64" and len(set(keys)) == len(keys) == min(count, total)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(1, 200))
def test_shares_are_fair_and_add_up(sizes: list[int], total: int) -> None:
    shares = fair_shares(sizes, total)
    assert sum(shares) == min(total, sum(sizes))
    for share, size in zip(shares, sizes, strict=True):
        assert (
            share == size or max(shares) - 1 <= share < size
        )  # smaller than another share only if it is the whole size


def test_by_default_it_is_written_where_git_ignores_it(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    repository = Path(__file__).parents[2]
    monkeypatch.chdir(tmp_path)
    run([str(root), "--samples", "1"])
    (written,) = (path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file())
    assert capsys.readouterr().out.startswith(f"{written}: 1 sample from bucket ")
    assert subprocess.run(["git", "check-ignore", "-q", str(written)], cwd=repository).returncode == 0


def drawn(text: str, lettering: Lettering) -> Image.Image:
    image = Image.new("RGB", (200, 20), "white")
    lettering.write(ImageDraw.Draw(image), 0, 0, text)
    return image


@pytest.fixture
def without_system_fonts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("precompute.lettering.system_fonts", list)


NO_CHARACTER = "\uffff"
"""Noncharacter without a glyph in any font."""


@pytest.mark.usefixtures("without_system_fonts")
def test_european_captions_need_no_system_font() -> None:
    text = "é ü ñ ß Å č ł ő „Größe“ – 5 € ½ Ελλάδα Москва e\u0301\u200b\ufeff"
    lettering = Lettering([text, NO_CHARACTER], 12)
    assert lettering.missing == [NO_CHARACTER]
    box = drawn(NO_CHARACTER, lettering)
    for char in "éüñßÅčłő„“–€½λМ":
        assert ImageChops.difference(drawn(char, lettering), box).getbbox() is not None, char
    assert lettering.length("a\u200b\ufeffb") == lettering.length("ab")  # no box for invisible characters


@pytest.fixture
def make_font(tmp_path: Path) -> Callable[[str, str, int], Path]:
    """Return a function that writes a font whose glyphs are rectangles of a given height."""

    def make(name: str, characters: str, height: int) -> Path:
        pen = TTGlyphPen(None)
        for place, corner in enumerate([(0, 0), (0, height), (1000, height), (1000, 0)]):
            (pen.lineTo if place else pen.moveTo)(corner)
        pen.closePath()
        names = [f"uni{ord(char):04X}" for char in characters]
        builder = FontBuilder(1000)
        builder.setupGlyphOrder([".notdef", *names])
        builder.setupCharacterMap(dict(zip(map(ord, characters), names, strict=True)))
        builder.setupGlyf(dict.fromkeys([".notdef", *names], pen.glyph()))
        builder.setupHorizontalMetrics(dict.fromkeys([".notdef", *names], (1000, 0)))
        builder.setupHorizontalHeader(ascent=1000, descent=0)
        builder.setupNameTable({"familyName": name, "styleName": "Regular"})
        builder.setupOS2()
        builder.setupPost()
        builder.save(tmp_path / name)
        return tmp_path / name

    return make


def test_scripts_that_the_first_font_lacks_come_from_system_fonts(
    make_font: Callable[[str, str, int], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "broken.ttf").write_bytes(b"no font")
    fonts = [tmp_path / "broken.ttf", make_font("few.ttf", "中", 300), make_font("many.ttf", "中文。a", 900)]
    monkeypatch.setattr("precompute.lettering.system_fonts", lambda: fonts)
    lettering = Lettering(["a 中文。 кот", "한"], 10)
    assert lettering.missing == ["한"]
    # the font that covers most provides these glyphs, 10 px wide and 9 px high; letters are still from DejaVu Sans
    assert lettering.length("中文。") == 30
    left, top, right, bottom = ImageChops.invert(drawn("中文。", lettering)).getbbox() or (0, 0, 0, 0)
    assert (right - left, bottom - top) == (30, 9)
    assert lettering.length("a") != 10
    assert lettering.length("a 中文。 кот") == pytest.approx(
        30 + lettering.length("a ") + lettering.length("кот") + lettering.length(" "), abs=1
    )


@pytest.mark.usefixtures("without_system_fonts")
def test_missing_glyphs_are_reported_in_one_line(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("precompute.preview.captions", lambda sample, encoding: ["中文字幕和日本語、한국어"])
    run([str(root), "--samples", "1", "--output", str(tmp_path / "new" / "sheet.png")])
    _, note = capsys.readouterr().out.splitlines()
    assert note.startswith("No installed font has a glyph for 、 (U+3001), 中 (U+4E2D), ")
    assert " and 7 more, so boxes are drawn instead." in note and "fonts-noto-cjk" in note
    assert Lettering(["plain"], 12).note == ""


def test_labels_are_wrapped_and_cut() -> None:
    lettering = Lettering(["word …"], 12)
    lines = wrapped("000001234\n" + "word " * 40, 140, lettering)
    assert lines[0] == "000001234" and len(lines) == 5 and lines[-1].endswith(" …")
    assert all(110 < lettering.length(line) <= 140 for line in lines[1:])
    # text without spaces, such as Chinese or a URL, continues the current line and breaks where the line is full
    lines = wrapped("key\nword " + "x" * 50, 140, Lettering(["word x…"], 12))
    assert lines[1].startswith("word xxx") and "".join(lines[1:]) == "word " + "x" * 50
    assert wrapped("key\nshort", 140, lettering) == ["key", "short"] and wrapped("key\n", 140, lettering) == ["key"]
    sheet = contact_sheet([Image.new("RGB", (512, 512))], ["key\ncaption"], "title", lettering)
    assert sheet.width == 528
