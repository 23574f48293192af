"""Identical text latents are stored only once per MDS file, and latentmill's readers restore them."""

from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from streaming import StreamingDataset

from bench.kit.roots import encoding_record
from shards.__main__ import run as shards
from shards.base.store import LocalStore
from shards.dataset import LatentDataset
from shards.format.buckets import Bucket
from shards.format.encoding import EncodingRecord
from shards.format.text import TEXT_SAMPLE, TextLatents
from shards.root.committed import load_receipts
from shards.root.reading import read_part
from shards.root.writing import Caption, PartWriter, Sample
from shards.tools.stats import root_stats
from shards.tools.verify import verify_root
from tests.fixtures import encode_all, precompute_config
from tests.roots import tree
from tests.runs import train_fields
from tests.tiny import make_samples, make_tar
from train.config import TrainConfig
from train.data.loader import Loader
from train.data.streams import find_data, open_data

CAPTIONS = ["a cat", "a dog", "a cat", "a cow", "a dog", "a cat"]


def write(folder: Path, shares: bool, **text: Any) -> EncodingRecord:
    """Write a part of samples whose text latents depend only on the caption."""
    encoding = encoding_record(6, 16, pooled=8, **text).model_copy(update={"deduplicates_text": shares})
    writer = PartWriter(folder, encoding, Bucket(64, 64))
    for number, caption in enumerate(CAPTIONS * 3):
        random = torch.Generator().manual_seed(len(caption) + ord(caption[-1]))
        latents = TextLatents(torch.randn(6, 16, generator=random), 3, torch.randn(8, generator=random))
        image = torch.full((8, 8, 8), float(number))
        captions: list[Caption | None] = [Caption(caption, {"text": latents}, frozenset())]
        writer.write(Sample(f"{number:04d}", captions, image, (64, 64, 0, 0), np.zeros(4, np.float32)))
    writer.finish()
    return encoding


def plain(sample: dict[str, Any]) -> dict[str, Any]:
    return {name: np.asarray(value).tolist() for name, value in sample.items() if name != TEXT_SAMPLE}


@pytest.mark.parametrize("text", [{}, {"storage": "float8"}, {"trim": True}, {"masked": True}])
@pytest.mark.parametrize("file_bytes", [1 << 27, 12_000])
def test_deduplicated_parts_read_back_identically(
    text: dict[str, Any], file_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """References never cross MDS files."""
    monkeypatch.setattr("shards.format.mds_writer.FILE_BYTES", file_bytes)
    write(tmp_path / "shared", True, **text)
    write(tmp_path / "whole", False, **text)
    assert len([*(tmp_path / "shared").glob("*.mds")]) == (1 if file_bytes > 1 << 20 else 2)
    found = [*read_part(tmp_path / "shared")]
    assert [plain(sample) for sample in found] == [plain(sample) for sample in read_part(tmp_path / "whole")]
    first = [int(sample[TEXT_SAMPLE][0]) for sample in found]
    if file_bytes > 1 << 20:
        assert first == [0, 1, 0, 3, 1, 0] + [0, 1, 0, 3, 1, 0] * 2
    sizes = [sum(path.stat().st_size for path in (tmp_path / name).glob("*.mds")) for name in ("shared", "whole")]
    assert sizes[0] < sizes[1]


def test_other_readers_find_empty_columns_where_text_repeats(tmp_path: Path) -> None:
    write(tmp_path / "part", True)
    dataset = StreamingDataset(local=str(tmp_path / "part"), shuffle=False, batch_size=1)
    sizes = [dataset[number]["text_latents.text"].size for number in range(6)]
    assert sizes == [96, 96, 0, 96, 0, 0]
    assert dataset[5][TEXT_SAMPLE].tolist() == [0] and dataset[5]["image_latents"].shape == (8, 8, 8)


@pytest.mark.heavy
def test_a_deduplicated_root_end_to_end(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shards.base.pool.start_pool", lambda most, *_: ThreadPoolExecutor(most))
    samples = make_samples(0, 12, [(80, 64)])
    for number, (_, members) in enumerate(samples):
        members["txt"] = CAPTIONS[number % 6].encode()
    make_tar(tmp_path / "tars", "00000", samples)
    roots = {name: tmp_path / name for name in ("whole", "shared")}
    for name, root in roots.items():
        text = {"deduplicate": name == "shared"}
        encode_all(precompute_config(models, tmp_path / "tars", root, buckets=["64x64"], text=text))
        assert list(verify_root(LocalStore(root))) == []
    for source, target, value in (("whole", "shared", "true"), ("shared", "whole", "false")):
        derived = tmp_path / f"derived-{target}"
        shards(["derive", str(roots[source]), str(derived), "--text.deduplicate", value])
        for part in (receipt.folder for receipt in load_receipts(LocalStore(roots[target]))):
            expected, found = tree(roots[target] / part), tree(derived / part)
            assert expected == found
    stats = root_stats(LocalStore(roots["shared"]), 100)
    assert stats["buckets"]["64x64"]["repeated_captions"] == 0.75

    batches = []
    for root in roots.values():
        config = TrainConfig.model_validate(train_fields(root, tmp_path / "run", global_batch_size=4))
        spec = open_data(config.data, 4, find_data(config.data, ()))
        batches.append([*islice(Loader(config.data, spec, 4, 0, 0, torch.arange(4)), 3)])
    for one, other in zip(*batches, strict=True):
        assert one.keys == other.keys and one.columns.keys() == other.columns.keys()
        for name, tensor in one.columns.items():
            torch.testing.assert_close(tensor, other.columns[name], rtol=0, atol=0)
    datasets = [LatentDataset(root, "64x64", posterior_mean=True, batch_size=1) for root in roots.values()]
    for number in (*range(12), -1):
        one, other = (dataset[number] for dataset in datasets)
        assert one["captions"] == other["captions"]
        torch.testing.assert_close(one["text.text"], other["text.text"], rtol=0, atol=0)
