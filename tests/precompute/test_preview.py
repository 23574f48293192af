"""Pages that show a root: its decoded images with their captions, its buckets and its rejects."""

import base64
import io
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from examples.shapes.encoders.vae import draw_pictures
from examples.shapes.models import MODELS
from precompute.preview import fair_shares, pick_samples, run
from shards.base.errors import RequestError
from shards.open import open_store
from shards.root.committed import load_receipts
from tests.fixtures import encode_all, folder_of, precompute_config
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
            caption = f"{'<b>number</b>' if i == 0 else 'number'} {i}"
            data = {"jpg": (folder / "picture.png").read_bytes(), "txt": caption.encode()}
            samples.append((f"{shard:05d}{i:04d}", data))
        if shard == 1:
            samples.append(("000010012", {"jpg": b"no image", "txt": b"none"}))
        make_tar(folder / "tars", f"{shard:05d}", samples)
    config = precompute_config(MODELS, folder / "tars", folder / "root", buckets=["64x64"])
    encode_all(config)
    np.save(folder / "pictures.npy", pictures)
    return folder_of(config)


def test_samples_are_from_all_parts(root: Path) -> None:
    store = open_store(root)
    assert [sample["key"][:5] for sample in pick_samples(store, "64x64", 4)] == [
        "00000",
        "00000",
        "00001",
        "00001",
    ]
    assert len(pick_samples(store, "64x64", 100)) == 12


def test_the_page(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run([str(root), "--samples", "5", "--output", str(tmp_path / "page.html")])
    assert capsys.readouterr().out == f"{tmp_path / 'page.html'}: 5 samples from 64x64\n"
    page = Page((tmp_path / "page.html").read_text())
    assert page.captions == ["<b>number</b> 0", "number 1", "number 6", "number 7", "number 8"]
    assert not page.elsewhere  # the page needs no other file
    pictures = [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) for url in page.pictures]
    assert [picture.size for picture in pictures] == [(64, 64)] * 5
    expected = np.load(root.parent / "pictures.npy")[[0, 1, 6, 7, 8]].astype(float)
    error = np.stack([np.asarray(picture.convert("RGB")) for picture in pictures]) - expected
    assert 20 * np.log10(255 / np.sqrt((error**2).mean())) > 25  # dB
    text = " ".join(page.text.split())
    assert "13 samples in, 12 encoded" in text and "64x64 12 " in text
    assert "not_an_image 1 7.7 % 000010012" in text


class Page(HTMLParser):
    """Content of a page, as its reader sees it."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.pictures: list[str] = []
        self.captions: list[str] = []
        self.elsewhere: list[str] = []
        """Addresses of other files."""
        self.text = ""
        self.tag = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tag = tag
        for name, value in attributes:
            if name == "src" and value and value.startswith("data:"):
                self.pictures.append(value)
            elif name in ("src", "href"):
                self.elsewhere.append(str(value))
        if tag == "p" and self.pictures:
            self.captions.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == "figcaption":
            self.tag = ""

    def handle_data(self, data: str) -> None:
        self.text += data + " "
        if self.tag == "p" and self.pictures:
            self.captions[-1] += data


def test_a_different_vae_is_refused(root: Path, models: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"did not produce these latents; according to encoding\.json"):
        run([str(root), "--vae", str(models / "vae"), "--output", str(tmp_path / "page.html")])
    shutil.copytree(MODELS / "vae", tmp_path / "moved")
    run([str(root), "--vae", str(tmp_path / "moved"), "--output", str(tmp_path / "page.html"), "--samples", "1"])


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
        keys = [sample["key"] for sample in pick_samples(store, "64x64", count)]
        assert len(set(keys)) == len(keys) == min(count, total)


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
    assert capsys.readouterr().out.startswith(f"{written}: 1 sample from ")
    assert subprocess.run(["git", "check-ignore", "-q", str(written)], cwd=repository).returncode == 0
