"""Uploading a root or a pipeline to a local hub, and training from the hub."""

import re
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi

from bench.kit.roots import encoding_record
from shards.__main__ import run as shards
from shards.base.errors import RequestError, WorkError
from shards.base.store import LocalStore
from tests.fake_hub import connect, fake_hub, keep_downloads_in
from tests.runs import curve, train_run
from train.__main__ import run as train


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_downloads_in(monkeypatch, tmp_path / "cache")


def files_below(folder: Path) -> dict[str, bytes]:
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {name: data for name, data in found.items() if not re.search(r"(^|/)\.", name)}


def test_a_root_is_pushed_and_trained_from_there(
    latents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The upload is interrupted once. The losses are those of training from the folder."""
    asked: list[dict[str, Any]] = []
    (tmp_path / "hub").mkdir()
    with fake_hub(tmp_path / "hub", asked=asked) as hub:
        connect(monkeypatch, hub)
        push = ["push", str(latents), "flaky/latents", "--license", "cc-by-4.0"]
        with pytest.raises(WorkError, match="was interrupted"):
            shards(push)
        assert not (tmp_path / "hub" / "index" / "manifests").exists()
        shards(push)
        assert "train from it with `root: hf://datasets/flaky/latents`" in capsys.readouterr().out
        assert asked[0]["visibility"] == "private"
        uploaded = files_below(tmp_path / "hub")
        card = uploaded.pop("README.md").decode()
        assert "\nlicense: cc-by-4.0\n" in card
        assert uploaded == files_below(latents)

        curves = []
        for name, root in (("near", str(latents)), ("far", "hf://datasets/flaky/latents")):
            data = {"streams": [{"root": root, "bucket": "64x64"}], "cache": str(tmp_path / "data")}
            curves.append(curve(train_run(latents, tmp_path / name, max_steps=3, data=data)))
        assert curves[0] == curves[1] and len(curves[0][0]) == 3


def test_a_manifest_published_during_the_upload_is_not_pushed(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that is running publishes a manifest after the manifests were listed, and before the parts are uploaded."""
    manifests = root / "index" / "manifests"
    before = {path.name: path.read_bytes() for path in manifests.iterdir()}
    upload_file = HfApi.upload_file

    def publish_first(*arguments: Any, **named: Any) -> Any:
        (manifests / "99999999.json").write_text("{}")
        return upload_file(*arguments, **named)

    monkeypatch.setattr(HfApi, "upload_file", publish_first)
    (tmp_path / "hub").mkdir()
    with fake_hub(tmp_path / "hub") as hub:
        connect(monkeypatch, hub)
        shards(["push", str(root), "org/latents", "--license", "cc-by-4.0"])
    assert (manifests / "99999999.json").exists()
    assert files_below(tmp_path / "hub" / "index" / "manifests") == before


def test_a_pipeline_is_pushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        connect(monkeypatch, hub)
        train(["push", str(folder), "org/model", "--license", "apache-2.0", "--public"])
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
        (["name", "--license", "cc0-1.0"], "name is not the name of a repository on the Hub"),
        (["hidden/name", "--license", "cc0-1.0"], "The hub refuses to write to"),
        (["gated/name", "--license", "cc0-1.0"], "Log in with `hf auth login`"),
    ],
)
def test_bad_requests(
    latents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    with fake_hub(tmp_path) as hub:
        connect(monkeypatch, hub)
        with pytest.raises(RequestError, match=re.escape(said)):
            shards(["push", str(latents), *words])


def test_a_card_in_another_encoding_is_not_pushed(root: Path) -> None:
    (root / "README.md").write_bytes("---\nlicense: cc0-1.0\n---\nBilder von Füchsen\n".encode("latin-1"))
    with pytest.raises(RequestError, match=r"README\.md is not UTF-8 text\. Save it as UTF-8, or remove it"):
        shards(["push", str(root), "org/name", "--license", "cc0-1.0"])


def test_what_cannot_be_pushed(tmp_path: Path) -> None:
    from train.export.push import push

    with pytest.raises(RequestError, match=r"is not a pipeline folder with a model card"):
        push([str(tmp_path), "org/name", "--license", "cc0-1.0"])
    (tmp_path / "README.md").write_text("---\nlicense: cc0-1.0\n---\n")  # of something else
    with pytest.raises(RequestError, match="is not a latents root"):
        shards(["push", str(tmp_path), "org/name", "--license", "cc0-1.0"])
    encoding_record(4, 4).save(LocalStore(tmp_path))
    with pytest.raises(RequestError, match="has no index, so training cannot read it"):
        shards(["push", str(tmp_path), "org/name", "--license", "cc0-1.0"])
