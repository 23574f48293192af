"""Uploading a root or a pipeline to a local hub, and training from the hub."""

import re
from pathlib import Path
from typing import Any

import pytest

from shards.base.errors import RequestError
from tests.fake_hub import fake_hub, with_hub
from tests.runs import curve, train_fields, write_config

COMMAND = "import sys; from {module}.__main__ import main; sys.argv[1:] = {words!r}; main()"


def run(hub: str, tmp_path: Path, module: str, *words: object) -> Any:
    """Run a command in a new process that uses `hub`, without hf_xet, which needs the real hub's servers."""
    code = COMMAND.format(module=module, words=[str(word) for word in words])
    return with_hub(hub, tmp_path / "cache", code, HF_HUB_DISABLE_XET="1")


def files_below(folder: Path) -> dict[str, bytes]:
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {name: data for name, data in found.items() if not re.search(r"(^|/)\.", name)}


def test_a_root_is_pushed_and_trained_from_there(latents: Path, tmp_path: Path) -> None:
    """The upload is interrupted once. The losses are those of training from the folder."""
    asked: list[dict[str, Any]] = []
    (tmp_path / "hub").mkdir()
    with fake_hub(tmp_path / "hub", asked=asked) as hub:
        push = ("push", latents, "flaky/latents", "--license", "cc-by-4.0")
        interrupted = run(hub, tmp_path, "shards", *push)
        assert interrupted.returncode == 1 and "was interrupted" in interrupted.stderr
        assert not (tmp_path / "hub" / "index" / "manifests").exists()
        done = run(hub, tmp_path, "shards", *push)
        assert done.returncode == 0, done.stderr
        assert "train from it with `root: hf://datasets/flaky/latents`" in done.stdout
        assert asked[0]["visibility"] == "private"
        uploaded = files_below(tmp_path / "hub")
        card = uploaded.pop("README.md").decode()
        assert "\nlicense: cc-by-4.0\n" in card
        assert uploaded == files_below(latents)

        curves = []
        for name, root in (("near", str(latents)), ("far", "hf://datasets/flaky/latents")):
            data = {"streams": [{"root": root, "bucket": "64x64"}], "cache": str(tmp_path / "data")}
            fields = train_fields(latents, tmp_path / name, max_steps=3, data=data)
            trained = run(hub, tmp_path, "train", "--config", write_config(tmp_path, fields))
            assert trained.returncode == 0, trained.stderr
            curves.append(curve(tmp_path / name))
        assert curves[0] == curves[1] and len(curves[0][0]) == 3


def test_a_pipeline_is_pushed(tmp_path: Path) -> None:
    folder = tmp_path / "export"
    (folder / "unet").mkdir(parents=True)
    (folder / "model_index.json").write_text("{}")
    (folder / "unet" / "config.json").write_text("{}")
    card = (
        "---\nlibrary_name: diffusers\n# license: fill this in\n---\n\n# A model\n\n**License:** to be filled in "
        "before\npublishing.\n\nfolder = '/home/me/export'  # the folder of this file\n"
    )
    (folder / "README.md").write_text(card)
    asked: list[dict[str, Any]] = []
    (tmp_path / "hub").mkdir()
    with fake_hub(tmp_path / "hub", asked=asked) as hub:
        done = run(hub, tmp_path, "train", "push", folder, "org/model", "--license", "apache-2.0", "--public")
    assert done.returncode == 0, done.stderr
    assert asked[0]["visibility"] == "public"
    uploaded = files_below(tmp_path / "hub")
    assert uploaded.keys() == {"model_index.json", "unet/config.json", "README.md"}
    assert uploaded["README.md"].decode() == (
        "---\nlibrary_name: diffusers\nlicense: apache-2.0\n---\n\n# A model\n\n**License:** apache-2.0\n\n"
        'folder = "org/model"\n'
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["org/name"], "No licence was given. It depends on the images"),
        (["name", "--license", "cc0-1.0"], "name is not the name of a repository on the hub"),
        (["hidden/name", "--license", "cc0-1.0"], "The hub refuses to write to"),
        (["gated/name", "--license", "cc0-1.0"], "Log in with `hf auth login`"),
    ],
)
def test_bad_requests(latents: Path, tmp_path: Path, words: list[str], said: str) -> None:
    with fake_hub(tmp_path) as hub:
        refused = run(hub, tmp_path, "shards", "push", latents, *words)
    assert refused.returncode == 2 and said in " ".join(refused.stderr.split())


def test_what_cannot_be_pushed(tmp_path: Path) -> None:
    from train.export.push import push

    with pytest.raises(RequestError, match=r"is not a pipeline folder with a model card"):
        push([str(tmp_path), "org/name", "--license", "cc0-1.0"])
