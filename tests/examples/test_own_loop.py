"""The example of a custom training loop, on a root with one text tower."""

import json
from pathlib import Path

import pytest

from examples import own_loop
from shards.base.errors import RequestError

CONFIG = {
    "in_channels": 4,
    "out_channels": 4,
    "block_out_channels": [16, 32],
    "layers_per_block": 1,
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    "attention_head_dim": 4,
    "norm_num_groups": 8,
}


def test_it_learns(latents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_loop, "BATCH", 8)
    width = json.loads((latents / "encoding.json").read_text())["texts"]["text"]["width"]
    (tmp_path / "unet.json").write_text(json.dumps(CONFIG | {"cross_attention_dim": width}))
    losses = own_loop.train(str(latents), "64x64", 40, tmp_path / "unet.json")
    assert len(losses) == 40 and sum(losses[-10:]) < 0.9 * sum(losses[:10])


@pytest.mark.parametrize(
    ("root", "bucket", "batch", "message"),
    [
        (None, "64x64", 1000, r"One batch needs 1000 samples, but the bucket 64x64 in .* has only 30"),
        (None, "96x96", 8, r"has no indexed bucket 96x96\. Indexed buckets: 128x128, 64x64"),
        ("/absent", "64x64", 8, "/absent"),
    ],
)
def test_unusable_roots_are_rejected(
    latents: Path, root: str | None, bucket: str, batch: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_loop, "BATCH", batch)
    with pytest.raises(RequestError, match=message):
        own_loop.train(root or str(latents), bucket, 1)
