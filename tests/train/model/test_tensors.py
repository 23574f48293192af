"""Files written tensor by tensor are the library's own, byte for byte."""

import hashlib
from pathlib import Path

import torch
from safetensors.torch import save_file

from train.model.tensors import write_tensors


def test_bytes_are_those_of_save_file(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "step/b.weight": torch.tensor(3.0),
        "exp_avg/b.weight": torch.randn(3, 4, 5, 6, generator=generator),
        "exp_avg/a": torch.randn(7, generator=generator),
        "empty": torch.zeros(0, 4),
        "half é": torch.randn(3, 3, generator=generator).half(),
        "bf": torch.randn(5, generator=generator).bfloat16(),
        "count": torch.arange(5),
        "flags": torch.tensor([True, False]),
        "codes": torch.arange(7, dtype=torch.uint8),
        "double": torch.randn(2, generator=generator).double(),
    }
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    # as they may lie in a run: other strides, and views of more
    laid = {
        **tensors,
        "exp_avg/b.weight": tensors["exp_avg/b.weight"].to(memory_format=torch.channels_last),
        "exp_avg/a": torch.stack([tensors["exp_avg/a"]] * 2, dim=1)[:, 1],
    }
    sha256 = write_tensors(tmp_path / "ours", laid)
    data = (tmp_path / "ours").read_bytes()
    assert data == (tmp_path / "theirs").read_bytes()
    assert sha256 == hashlib.sha256(data).hexdigest()
