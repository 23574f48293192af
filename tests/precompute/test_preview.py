"""The contact sheet: the pictures that went in come back, under their captions."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from examples.shapes.encoders.vae import draw_pictures
from examples.shapes.models import MODELS
from precompute.preview import contact_sheet, decode_pictures, load_decoder, pick_samples, run, wrapped
from shards.base.errors import RequestError
from shards.format.encoding import EncodingRecord
from shards.open import open_store
from tests.conftest import encode_all, folder_of, precompute_config
from tests.tiny import make_tar


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve pictures of the demo's world in two shards, encoded by the demo's VAE."""
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


def test_what_went_in_comes_back(root: Path) -> None:
    encoding = EncodingRecord.load(open_store(root))
    _, samples = pick_samples(open_store(root), "64x64", 12)
    assert [sample["caption"] for sample in samples] == [f"number {i}" for i in range(12)]
    decoded = np.stack([np.asarray(p) for p in decode_pictures(samples, encoding, load_decoder(encoding, None))])
    error = decoded.astype(float) - np.load(root.parent / "pictures.npy")
    assert 20 * np.log10(255 / np.sqrt((error**2).mean())) > 25  # dB


def test_samples_are_of_all_parts(root: Path) -> None:
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
    assert "5 samples of 64x64" in capsys.readouterr().out
    sheet = np.asarray(Image.open(tmp_path / "sheet.png"))
    # three columns of 256 px, two rows; the sixth cell stays white
    assert sheet.shape[1] == 3 * 264 + 8 and (sheet[-100:, -264:] == 255).all() and (sheet[-340:-100, :264] < 255).any()


def test_another_vae_is_refused(root: Path, models: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="is not the one that made these latents"):
        run([str(root), "--vae", str(models / "vae"), "--output", str(tmp_path / "sheet.png")])
    shutil.copytree(MODELS / "vae", tmp_path / "moved")
    run([str(root), "--vae", str(tmp_path / "moved"), "--output", str(tmp_path / "sheet.png"), "--samples", "1"])


def test_a_bucket_that_is_not_there(root: Path) -> None:
    with pytest.raises(RequestError, match="holds no sample in 512x512"):
        run([str(root), "--bucket", "512x512"])


def test_labels_are_wrapped_and_cut() -> None:
    lines = wrapped("000001234\n" + "word " * 40, 20)
    assert lines[0] == "000001234" and len(lines) == 5 and lines[-1].endswith("…")
    assert all(len(line) <= 20 for line in lines[1:])
    sheet = contact_sheet([Image.new("RGB", (512, 512))], ["key\ncaption"], "title")
    assert sheet.width == 528
