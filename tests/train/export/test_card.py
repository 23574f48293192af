"""The model card of an export."""

from pathlib import Path
from typing import Any

import pytest
from diffusers import DPMSolverMultistepScheduler

from bench.kit.roots import encoding_record


def test_card_describes_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/test_end_to_end.py runs the card's code."""
    from train.config import TrainConfig
    from train.export.card import exported_weights, model_card
    from train.run.checkpoints.checkpoint import Checkpoint
    from train.run.state import TrainState

    encoding = encoding_record(16, 16)
    fields: Any = {
        "run_dir": tmp_path / "phase9",
        "max_steps": 7,
        "backbone": {"config": "configs/unet/small.json"},
        "data": {
            "streams": [{"root": "r", "bucket": "64x96"}],
            "filter": {"aesthetic": {"min": 4.5}, "width": {"min": 64, "max": 99}},
        },
        "objective": {"prediction": "flow_matching", "timestep_sampling": "logit_normal", "logit_std": 0.8},
        "ema": {"kind": "power", "start_step": 3},
    }
    stream = {"bucket": "64x96", "weight": 1.0, "samples": 1234, "index_sha256": 64 * "b", "encoding_id": "cafe"}
    unet = {"block_out_channels": [1, 2], "cross_attention_dim": 16}
    checkpoint = {
        "state": {"step": 7},
        "fingerprint": {"streams": [stream], "global_batch_size": 2048, "unet": unet},
        "files": {
            "ema/diffusion_pytorch_model-00002-of-00002.safetensors": 64 * "d",
            "ema/diffusion_pytorch_model-00001-of-00002.safetensors": 64 * "c",
            "ema/diffusion_pytorch_model.safetensors.index.json": 64 * "e",
        },
    }
    config = TrainConfig.model_validate(fields)
    state = TrainState(step=7).to_json()
    saved = Checkpoint(tmp_path / "step-7", checkpoint | {"state": state})
    weights = exported_weights(config, saved, tmp_path / "step-7" / "ema")
    described = (encoding, [encoding.texts["text"]], weights, DPMSolverMultistepScheduler())
    card = model_card(tmp_path / "phase9", tmp_path, config, checkpoint, *described)
    for words in (
        "# phase9",
        "| steps | 7 of 2048 samples |",
        "flow matching with logit_normal timesteps (mean 0, standard deviation 0.8)",
        "moving average of the weights (power function of width 0.1, starting at step 3)",
        "1,234 samples at 64x96 px with aesthetic ≥ 4.5 and width ≥ 64 and width ≤ 99 (missing: drop), 1 passes per "
        "epoch; encoding `cafe`",
        "height=96, width=64",
        f"SHA-256 hashes: `{64 * 'c'}`, `{64 * 'd'}`.",
        "**License:** to be filled in",
    ):
        assert words in card
