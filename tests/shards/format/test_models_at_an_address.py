"""Models on an object store: downloaded once per machine, and compared with their record."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from precompute.config import describe_encoding
from shards.base.errors import RequestError
from shards.base.remote import RemoteStore
from shards.format import models as hub_models
from shards.format.models import hash_weights, model_folder, recorded_folder
from shards.format.towers import Weights
from tests.conftest import precompute_config


@pytest.fixture
def gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files downloaded from stores, with a separate cache for this test."""
    fetched: list[str] = []
    get = RemoteStore.get

    def counted(self: RemoteStore, name: str, target: Path) -> None:
        fetched.append(name)
        time.sleep(0.02)
        get(self, name, target)

    monkeypatch.setattr(RemoteStore, "get", counted)
    monkeypatch.setattr(hub_models.constants, "HF_HOME", str(tmp_path / "cache"))
    return fetched


def put(folder: Path, address: str) -> None:
    files = {path.name: path for path in folder.iterdir()}
    RemoteStore(address).put({**files, "other.bin": next(iter(files.values()))})


def test_models_at_an_address_are_those_of_the_folder(s3: str, models: Path, tmp_path: Path, gets: list[str]) -> None:
    names = ("vae", "text_encoder", "tokenizer")
    for name in names:
        put(models / name, f"{s3}/models/{name}")
    config = precompute_config(models, tmp_path, tmp_path / "latents")
    vae, model, tokenizer = (f"{s3}/models/{name}" for name in names)
    text = config.texts["text"].model_copy(update={"model": model, "tokenizer": tokenizer})
    found = describe_encoding(config.model_copy(update={"vae": vae, "texts": {"text": text}}))
    assert found.id == describe_encoding(config).id
    assert {weights.name for weights in found.weights.values()} == {f"{s3}/models/{name}" for name in names}
    once = len(gets)
    assert once and "other.bin" not in gets
    for weights in found.weights.values():
        with ThreadPoolExecutor(8) as workers:
            assert len(set(workers.map(recorded_folder, [weights] * 8))) == 1
    assert len(gets) == once


def test_one_of_a_machines_processes_fetches(s3: str, models: Path, gets: list[str]) -> None:
    put(models / "vae", f"{s3}/vae")
    weights = hash_weights(f"{s3}/vae", models / "vae")
    with ThreadPoolExecutor(8) as workers:
        (folder,) = set(workers.map(recorded_folder, [weights] * 8))
    assert sorted(gets) == sorted(path.name for path in folder.iterdir()) and len(gets) == 2
    half = folder.parent / ".fetching-of-one-who-was-killed"
    half.mkdir()
    changed = bytearray((models / "vae" / "diffusion_pytorch_model.safetensors").read_bytes())
    changed[-1] ^= 1
    RemoteStore(f"{s3}/vae").write("diffusion_pytorch_model.safetensors", bytes(changed))
    assert recorded_folder(weights) == folder and len(gets) == 2  # still cached here
    newer = model_folder(f"{s3}/vae/")
    assert newer != folder and newer.parent == folder.parent and len(gets) == 4 and not half.exists()
    assert recorded_folder(hash_weights(weights.name, newer)) == newer
    with pytest.raises(RequestError, match=r"differs from the model recorded in encoding.json"):
        recorded_folder(Weights(name=weights.name, sha256="0" * 64))


def test_what_is_not_there_is_said(s3: str, gets: list[str]) -> None:
    with pytest.raises(RequestError, match=r"is not a model folder: it contains none of config.json, "):
        model_folder(f"{s3}/absent")
    with pytest.raises(RequestError, match=r"contains none of config.json"):
        recorded_folder(Weights(name=f"{s3}/absent", sha256="0" * 64))
