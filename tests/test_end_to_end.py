"""The complete pipeline on tiny data, with the users' commands: tars → latents → both phases → export → a picture."""

import contextlib
import json
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, StableDiffusionPipeline, UNet2DConditionModel

from shards.base.device import available_cores
from shards.base.errors import RequestError
from shards.open import open_store
from tests.evaluation.sets import draw_here, pictures, sampling
from tests.fixtures import encode_all, folder_of, precompute_config
from tests.roots import load_tars, precompute_arguments
from tests.runs import UNET, run_module, train_fields, train_run, write_config
from tests.tiny import make_models
from train.__main__ import run as train
from train.run.reporting.json_lines import read_json_lines


def test_end_to_end(models: Path, tars: Path, tmp_path: Path) -> None:
    """A damaged tar is reported after one attempt, and costs nothing but its own samples."""
    shutil.copytree(models, tmp_path / "models")
    shutil.copytree(tars, tmp_path / "tars")
    (tmp_path / "tars" / "00002.tar").write_bytes((tars / "00001.tar").read_bytes()[:-20_000])
    root = tmp_path / "latents"

    options = ["--workers.attempts", "2", "--workers.backoff", "0"]
    options += ["--workers.num_cpus", str(available_cores())]  # one worker, because each takes seconds to start
    result = run_module("precompute", *precompute_arguments(tmp_path / "models", tmp_path / "tars", root, *options))
    assert result.returncode == 1
    assert "tar 00002: attempt 1 of 2 failed, giving up on the tar: DamagedInput" in result.stderr
    assert "attempt 2 of 2" not in result.stderr
    assert "1 of 3 tars failed (00002: DamagedInput" in result.stderr
    assert "Tars: 2 encoded (46 samples in, 30 accepted, 16 rejected)" in result.stdout
    assert "20 samples in 128x128, 30 samples in 64x64" in result.stdout
    assert {tar.tar: sorted(tar.parts) for tar in load_tars(open_store(root))} == {
        tar: ["128x128", "64x64"] for tar in ("00000", "00001")
    }
    index = json.loads((root / "64x64" / "index.json").read_text())
    assert [entry["raw_data"]["basename"].partition(".")[0] for entry in index["shards"]] == ["00000", "00001"]

    # the trainer must work without these
    shutil.move(tmp_path / "models", tmp_path / "hidden")
    shutil.rmtree(tmp_path / "tars")
    phase1 = train_fields(root, tmp_path / "phase1", UNET, max_steps=3)
    phase2 = train_fields(root, tmp_path / "phase2", UNET, max_steps=3, init_from=str(tmp_path / "phase1"))
    phase2["data"]["streams"][0]["bucket"] = "128x128"
    for fields in (phase1, phase2):
        result = run_module("train", "--config", str(write_config(tmp_path, fields)))
        assert result.returncode == 0, result.stderr
        assert [row["step"] for row in read_json_lines(Path(fields["run_dir"]) / "metrics.jsonl")] == [1, 2, 3]
        assert (Path(fields["run_dir"]) / "loss.png").is_file()

    with pytest.raises(RequestError, match=f"{tmp_path}/models/vae is neither an existing folder nor a hub name"):
        train(["export", str(tmp_path / "phase2")])

    shutil.move(tmp_path / "hidden", tmp_path / "models")
    result = run_module("train", "export", str(tmp_path / "phase2"))
    assert result.returncode == 0, result.stderr
    run_card(tmp_path / "phase2" / "export", tmp_path)
    pipeline = StableDiffusionPipeline.from_pretrained(tmp_path / "phase2" / "export", safety_checker=None)
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    image = pipeline("two blobs", num_inference_steps=2, generator=generator, output_type="np").images[0]
    assert image.shape == (128, 128, 3) and np.isfinite(image).all()


def run_card(export: Path, folder: Path) -> None:
    """Run the model card's code with fewer steps; it writes a picture."""
    code = (export / "README.md").read_text().split("```python\n")[1].split("```")[0]
    with contextlib.chdir(folder):
        exec(code.replace("num_inference_steps=50", "num_inference_steps=2"), {"__name__": "__main__"})
    assert (folder / "picture.png").is_file()


def test_export_refuses_another_vae(latents: Path, tmp_path: Path) -> None:
    train_run(latents, tmp_path / "run", UNET, max_steps=1, ema={"start_step": None})
    other = make_models(tmp_path / "other", seed=1)
    with pytest.raises(RequestError, match="is not the vae that encoded the latents"):
        train(["export", str(tmp_path / "run"), "--vae", str(other / "vae")])
    with pytest.raises(RequestError, match="has no moving average"):
        train(["export", str(tmp_path / "run"), "--weights", "ema"])


def test_a_trimmed_root_trains_and_samples_with_its_mask(models: Path, tars: Path, tmp_path: Path) -> None:
    config = precompute_config(
        models, tars, tmp_path / "root", buckets=["64x64"], text={"storage": "float8", "trim": True}
    )
    encode_all(config)
    fields = train_fields(folder_of(config), tmp_path / "run", UNET, max_steps=2)
    train(["--config", str(write_config(tmp_path, fields))])
    train(["export", str(tmp_path / "run")])
    export = str(tmp_path / "run" / "export")
    run_card(tmp_path / "run" / "export", tmp_path)
    for stock in (StableDiffusionPipeline, DiffusionPipeline):  # would draw a different picture
        try:
            loaded = stock.from_pretrained(export)
        except ValueError as error:
            assert "contains custom code in trimmed_pipeline.py" in str(error)
        else:  # diffusers 0.36 runs the code of a local folder without asking
            assert version("diffusers").startswith("0.36.")
            assert type(loaded).__name__ == "TrimmedStableDiffusionPipeline"
    drawn = draw_here(Path(export), tmp_path / "drawn", sampling(images_per_prompt=1, part_size=5))
    assert len(pictures(drawn)) == 5
    pipeline = StableDiffusionPipeline.from_pretrained(export, trust_remote_code=True, safety_checker=None)
    assert type(pipeline).__name__ == "TrimmedStableDiffusionPipeline"
    pipeline.set_progress_bar_config(disable=True)
    masks: list[torch.Tensor] = []
    forward = UNet2DConditionModel.forward

    def spy(self: UNet2DConditionModel, *args: object, **kwargs: Any) -> object:
        masks.append(kwargs["encoder_attention_mask"])
        return forward(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UNet2DConditionModel, "forward", spy)
        image = pipeline(["a", "a b c"], num_inference_steps=2, output_type="np", height=64, width=64).images
    assert image.shape == (2, 64, 64, 3)
    # empty, empty, then begin + words + end
    assert [int(mask.sum()) for mask in masks[0]] == [2, 2, 3, 5]
