"""The end of a worker's process after an error from which it cannot recover."""

import sys
from typing import Any

import pytest

from cluster.actor import WorkerActor
from shards.base.errors import RequestError, Stuck, WorkError


@pytest.mark.parametrize(
    ("error", "ends"),
    [
        (Stuck("hangs"), True),
        (RuntimeError("CUDA error: bus"), True),
        (WorkError("no"), False),
        (RequestError("CUDA error: no driver"), False),  # torch never used the GPU
    ],
)
def test_a_worker_that_cannot_continue_ends_its_process(
    error: Exception, ends: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("ray.get_gpu_ids", list)
    monkeypatch.setattr("os._exit", sys.exit)
    unused: Any = None
    with pytest.raises(SystemExit if ends else type(error)):
        WorkerActor[None, None](fail, unused).attempt(fail, "00042", None, 1)
    assert f"00042: attempt 1 failed: {type(error).__name__}: {error}\n" in capsys.readouterr().err
