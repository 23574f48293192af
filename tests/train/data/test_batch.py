"""Loader workers collate batches into shared memory."""

import numpy as np
import pytest
import torch

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


@pytest.mark.parametrize("shared", [False, True])
def test_samples_are_stacked_and_padded(shared: bool) -> None:
    lengths = {"image_latents": None, "text_latents.text": 3, "num_tokens.text": None}
    batch = Collate(torch.arange(3), lengths, shared=shared)(samples(3))
    assert [tensor.is_shared() for tensor in tensors(batch)] == [shared] * 2
    assert batch.columns["image_latents"].dtype == torch.float16 and batch.columns["image_latents"].shape == (
        3,
        8,
        2,
        2,
    )
    assert batch.columns["image_latents"][:, 0, 0, 0].tolist() == [0, 1, 2]
    assert batch.columns["text_latents.text"][..., 0].tolist() == [[0, 0, 0], [1, 1, 0], [2, 2, 2]]
    assert batch.columns["num_tokens.text"].tolist() == [1, 2, 3] and batch.keys == ["0", "1", "2"]
