"""Code in a model's folder: executed only if the user trusts it, and part of the model's hash."""

import json
import shutil
from pathlib import Path

import pytest

from evaluation.sampling.model import hash_pipeline, prepare_model
from evaluation.sampling.pipeline import load_pipeline
from shards.base.errors import RequestError
from shards.open import open_store

CODE = """from pathlib import Path

from diffusers import StableDiffusionPipeline

Path({ran!r}).touch()


class Own(StableDiffusionPipeline):
    pass
"""


@pytest.fixture
def folder(pipeline: Path, tmp_path: Path) -> Path:
    """A copy of the pipeline that tests may modify."""
    return Path(shutil.copytree(pipeline, tmp_path / "model"))


def edit_index(folder: Path, **fields: object) -> None:
    """Set fields of the pipeline's model_index.json."""
    path = folder / "model_index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_code_is_executed_only_if_trusted(folder: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (folder / "own.py").write_text(CODE.format(ran=str(ran)))
    edit_index(folder, _class_name=["own", "Own"])
    for load in (
        lambda: prepare_model(str(folder), None, "auto", open_store(tmp_path / "out")),
        lambda: load_pipeline(folder, "cpu", "float32"),
    ):
        with pytest.raises(RequestError, match=r"contains Python code \(own\.py\).*--trust_remote_code true"):
            load()
    assert not ran.exists() and not (tmp_path / "out").exists()
    prepare_model(str(folder), None, "auto", open_store(tmp_path / "out"), trust_remote_code=True)
    assert type(load_pipeline(folder, "cpu", "float32", trust_remote_code=True)).__name__ == "Own"
    assert ran.exists()


def test_code_of_a_component_is_refused(folder: Path) -> None:
    (folder / "unet" / "mine.py").write_text("raise AssertionError\n")
    edit_index(folder, unet=["mine", "Mine"])
    with pytest.raises(RequestError, match=r"\(unet/mine\.py\)"):
        load_pipeline(folder, "cpu", "float32")


def test_a_file_that_the_index_does_not_name_is_not_executed(folder: Path, tmp_path: Path) -> None:
    ran, before = tmp_path / "ran", hash_pipeline(folder)
    (folder / "pipeline.py").write_text(CODE.format(ran=str(ran)))
    assert type(load_pipeline(folder, "cpu", "float32")).__name__ == "StableDiffusionPipeline"
    assert not ran.exists() and hash_pipeline(folder) == before


def test_the_hash_covers_the_class_and_the_code(folder: Path) -> None:
    found = [hash_pipeline(folder)]
    edit_index(folder, _diffusers_version="0.1", _name_or_path="elsewhere")
    assert hash_pipeline(folder) == found[0]
    edit_index(folder, _class_name="StableDiffusionImg2ImgPipeline")
    found.append(hash_pipeline(folder))
    edit_index(folder, _class_name=["own", "Own"])
    for code in ("a = 1\n", "a = 2\n"):
        (folder / "own.py").write_text(code)
        found.append(hash_pipeline(folder))
    (folder / "imported.py").write_text("")  # own.py may import it
    found.append(hash_pipeline(folder))
    assert len(set(found)) == 5
