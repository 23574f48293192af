"""Loader workers collate batches into shared memory."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from train.data.batch import Batch, Collate


def samples(count: int) -> list[dict[str, object]]:
    """Samples as read from MDS files, with captions of 1, 2, 3 … tokens."""
    return [
        {
            "key": str(i),
            "image_latents": np.full((8, 2, 2), i, np.float16),
            "text_latents.text": np.full((i + 1, 4), i, np.float16),
        }
        for i in range(count)
    ]


def tensors(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The tensors that are stacked from samples."""
    return batch.columns["image_latents"], batch.columns["text_latents.text"]


class SayWhere(Collate):
    """Returns a batch, and whether its tensors were in shared memory before they were sent."""

    def __call__(self, samples: list[dict[str, object]]) -> tuple[Batch, list[bool]]:  # type: ignore[override]
        batch = super().__call__(samples)
        return batch, [tensor.is_shared() for tensor in tensors(batch)]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_worker_collates_into_shared_memory(num_workers: int) -> None:
    collate = SayWhere(torch.arange(3), {"image_latents": None, "text_latents.text": 3, "num_tokens.text": None})
    ((batch, shared),) = DataLoader(samples(3), 3, collate_fn=collate, num_workers=num_workers)  # type: ignore[arg-type]
    assert shared == [num_workers > 0] * 2
    assert batch.columns["image_latents"].dtype == torch.float16 and batch.columns["image_latents"].shape == (
        3,
        8,
        2,
        2,
    )
    assert batch.columns["image_latents"][:, 0, 0, 0].tolist() == [0, 1, 2]
    assert batch.columns["text_latents.text"][..., 0].tolist() == [[0, 0, 0], [1, 1, 0], [2, 2, 2]]
    assert batch.columns["num_tokens.text"].tolist() == [1, 2, 3] and batch.keys == ["0", "1", "2"]
