"""Which samples are validated at which timestep, and how their losses are averaged."""

from pathlib import Path

import fsspec
import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from bench.kit.roots import make_root
from shards.base.durable import DamagedFile
from shards.base.errors import RequestError
from shards.format.encoding import EncodingRecord
from shards.open import open_store
from shards.root.exclusions import add_exclusion, make_exclusion
from tests.tiny import flip_a_bit
from tests.train.specs import CHANNELS, TOKENS, WIDTH, make_batch
from train.data.batch import Batch
from train.data.draws import Draws
from train.objective.config import ObjectiveConfig, ValidationConfig
from train.objective.loss import NoisyBatch
from train.objective.paths import noise_path
from train.objective.validation import FIRST_STEP, Validation, find_validation, open_validation

SAMPLES = 21


class TracingLoss:
    """A loss whose errors reveal the sample and the timestep."""

    path = noise_path(ObjectiveConfig(prediction="flow_matching"), torch.device("cpu"))
    aligned = None

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def draw(self, batch: Batch, draws: Draws) -> None:
        assert draws.slots.equal(batch.slots) and draws.step >= FIRST_STEP

    def add_noise_at(self, batch: Batch, timesteps: Tensor, dropped: Tensor, random: None) -> NoisyBatch:
        assert not dropped.any()
        return NoisyBatch(batch, dropped, timesteps, timesteps, timesteps)

    def squared_error(self, unet: object, noisy: NoisyBatch) -> Tensor:
        self.sizes.append(len(noisy))
        return (noisy.batch.slots.float() ** 2 + noisy.timesteps)[: noisy.num_real]


@pytest.mark.parametrize("dealt", [False, True])
@pytest.mark.parametrize("places", ["middles", "starts"])
@pytest.mark.parametrize("microbatch_size", [None, 3])
def test_each_sample_at_all_timesteps_or_at_one_in_turn(dealt: bool, places: str, microbatch_size: int | None) -> None:
    """MLPerf's loop for FLUX.1: sample i at t = (i mod 8)/8, a mean for each t, and the mean of these."""
    batches = []
    for start in range(0, SAMPLES, 4):
        slots = torch.arange(start, min(start + 4, SAMPLES))
        latents, text = torch.randn(len(slots), CHANNELS, 8, 8).half(), torch.randn(len(slots), TOKENS, WIDTH).half()
        batches.append(make_batch([""] * len(slots), slots, latents, text))
    validation = Validation(batches, 0, ValidationConfig(timesteps=places, dealt=dealt, batch_size=4))
    loss = TracingLoss()
    found = validation(torch.nn.Identity(), loss, Accelerator(cpu=True), microbatch_size)  # type: ignore[arg-type]
    sizes = [3] * 12 if microbatch_size else [4] * 5 + [1]  # every microbatch is filled, and every batch takes two
    assert sorted(loss.sizes) == sorted(sizes * (1 if dealt else 8))
    filled = Validation([*batches, batches[0]], 0, validation.config, filler=True)
    assert filled(torch.nn.Identity(), loss, Accelerator(cpu=True), microbatch_size) == found  # type: ignore[arg-type]

    sums, counts = [0.0] * 8, [0] * 8
    for i in range(SAMPLES):
        for k in [i % 8] if dealt else range(8):
            sums[k] += i**2 + (1000 * k / 8 if places == "starts" else 1000 * (k + 0.5) / 8)
            counts[k] += 1
    means = [total / count for total, count in zip(sums, counts, strict=True)]
    assert list(found["val_loss_by_timestep"].values()) == pytest.approx(means, rel=1e-6)
    assert found["val_loss"] == pytest.approx(sum(means) / 8, rel=1e-6)


def keys_of(root: Path | str, samples: int, rank: int = 0, ranks: int = 1) -> list[list[str]]:
    """Return the keys of each batch of a rank."""
    config = ValidationConfig(root=root, bucket="64x64", samples=samples, batch_size=4)
    found, encoding = find_validation(config), EncodingRecord.load(open_store(root))
    return [batch.keys for batch in open_validation(config, encoding, 0, found, rank, ranks).batches]


def test_excluded_samples_are_not_validated_on(tmp_path: Path) -> None:
    root = make_root(tmp_path / "root", {"64x64": [5, 6, 4]})
    before = [key for batch in keys_of(root, 7) for key in batch]
    add_exclusion(open_store(root), make_exclusion("key", [before[1], before[5]]))
    after = [key for batch in keys_of(root, 7) for key in batch]
    assert after[:5] == [key for key in before if key not in (before[1], before[5])] and len(after) == 7


def test_only_a_resumed_run_is_told_to_change_its_index(tmp_path: Path) -> None:
    config = ValidationConfig(root=make_root(tmp_path / "root", {"64x64": [5]}), bucket="64x64", samples=4)
    pin = find_validation(config).pin | {"index_sha256": "0" * 64}
    with pytest.raises(RequestError, match=r"pinned to this index for validation\. .*--data\.index newest"):
        find_validation(config, pin)
    with pytest.raises(RequestError, match="is not a latents root") as refusal:
        find_validation(config.model_copy(update={"root": tmp_path / "absent"}))
    assert "pinned to" not in str(refusal.value)


def test_each_rank_reads_its_own_batches_alone(tmp_path: Path) -> None:
    root = make_root(tmp_path / "root", {"64x64": [5, 6]})
    batches = keys_of(root, 11)
    assert [len(batch) for batch in batches] == [4, 4, 3]
    assert keys_of(root, 11, 0, 2) == [batches[0], batches[2]]
    assert keys_of(root, 11, 1, 2) == [batches[1], batches[0]]  # the last batch only keeps the ranks in step
    config = ValidationConfig(root=root, bucket="64x64", samples=11, batch_size=4)
    encoding = EncodingRecord.load(open_store(root))
    found = find_validation(config)
    fillers = [open_validation(config, encoding, 0, found, rank, 2).filler for rank in (0, 1)]
    assert fillers == [False, True]


def test_no_whole_file_of_a_remote_root_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local, address = make_root(tmp_path / "root", {"64x64": [40]}), f"memory://{tmp_path.name}"
    file_system = fsspec.filesystem("memory")
    file_system.put(f"{local}/", f"{address}/", recursive=True)
    (size,) = [path.stat().st_size for path in local.glob("64x64/*/*.mds")]
    downloaded: list[int] = []
    original = type(file_system).cat_file

    def cat_file(self: object, path: str, *args: object, **options: object) -> bytes:
        data: bytes = original(self, path, *args, **options)
        downloaded.extend([len(data)] if path.endswith(".mds") else [])
        return data

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a whole file is downloaded")

    monkeypatch.setattr(type(file_system), "cat_file", cat_file)
    monkeypatch.setattr(type(file_system), "get", refuse)
    monkeypatch.setattr(type(file_system), "get_file", refuse)
    assert keys_of(address, 2) == keys_of(local, 2)
    assert 0 < sum(downloaded) < size / 10


def test_a_damaged_local_file_is_named(tmp_path: Path) -> None:
    root = make_root(tmp_path / "root", {"64x64": [5]})
    (path,) = root.glob("64x64/*/*.mds")
    flip_a_bit(path)
    with pytest.raises(DamagedFile, match=f"{path} is damaged"):
        keys_of(root, 2)
