"""Pictures that kill or stop the worker of a real job."""

from pathlib import Path

import pytest

from shards.open import open_store
from shards.tools.verify import verify_root
from tests.fixtures import SIZES
from tests.roots import load_tars, precompute_arguments
from tests.runs import PYTHON, run_module
from tests.tiny import make_samples, make_tar


@pytest.mark.slow
def test_a_job_finds_the_pictures_that_kill_its_workers(models: Path, tmp_path: Path) -> None:
    """Encode a shard with a picture that kills, a shard with a picture that never finishes, and an intact shard."""
    for shard, poison in enumerate((b"SEGFAULT", b"LOOP", None)):
        samples = make_samples(shard, 8, SIZES)
        poisons = [(f"{shard:05d}9000", {"jpg": poison, "txt": b"x"})] if poison else []
        make_tar(tmp_path / "tars", f"{shard:05d}", samples[:4] + poisons + samples[4:])
    arguments = precompute_arguments(
        models, tmp_path / "tars", tmp_path / "root", "--limits.decode_seconds", "2", "--workers.num_cpus", "2"
    )
    result = run_module("tests.faults.poisoned_job", *arguments, launcher=PYTHON)
    assert result.returncode == 0, result.stderr
    assert list(verify_root(open_store(tmp_path / "root"))) == []
    receipts = load_tars(open_store(tmp_path / "root"))
    assert [receipt.rejected.get("decoder_crash", 0) for receipt in receipts] == [1, 1, 0]
    attempts = [receipt.parts["64x64"].attempts for receipt in receipts]
    assert attempts[:2] >= [2, 2] and attempts[2] <= 3, attempts  # a killed process loses its other tars too
    assert [receipt.samples_in for receipt in receipts] == [9, 9, 8]
