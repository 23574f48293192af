"""The benchmark of the encoders: its mixture, timing and output file."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bench.encode import MIX, RepeatableBatch, count_flops, mixture, rates_of, sizes_for
from bench.kit.common import bench_file, encoder_rates, write_bench_file
from plan.measured import read_rates


def work(count: int, log: list[str], name: str) -> RepeatableBatch:
    def start() -> Callable[[], object]:
        log.append(f"start {name}")
        return lambda: log.append(f"wait {name}")

    return RepeatableBatch(start, count, 10 * count)


@pytest.mark.parametrize(("small", "large"), [(64, 64), (64, 16), (8, 8)])
def test_the_mixture_has_the_training_sets_ratio(small: int, large: int) -> None:
    few, many = work(small, [], "small"), work(large, [], "large")
    batches = mixture(few, many)
    assert batches.count(many) == 3
    wanted = MIX[0] / MIX[1] * 3 * large / small
    assert abs(batches.count(few) - wanted) <= 0.5


def test_timed_batches_overlap() -> None:
    log: list[str] = []
    rates_of([work(4, log, "a")], num_batches=5)
    timed = log[2 * (1 + 3) :]
    assert timed[:3] == ["start a"] * 3 and timed[3] == "wait a"
    assert timed.count("start a") == timed.count("wait a") == 5


def test_the_planner_reads_the_file(tmp_path: Path) -> None:
    rates = {"256x256": 900.0, "512x512": 220.0, "mixed": 500.0, "text": 5000.0}
    path = tmp_path / "encode.json"
    write_bench_file(path, bench_file("bench.encode", "NVIDIA H100 80GB HBM3", encoder_rates(rates.items())))
    read = read_rates([str(path)], "H100")
    assert read.of("encode", "512x512")[0].images_per_second_per_gpu == 220
    assert read.of("text", None)[0].images_per_second_per_gpu == 5000


def test_flops_match_the_published_architectures() -> None:
    """Counted on the meta device, without a GPU."""
    counted = count_flops(sizes_for(torch.device("cuda")))
    found = {name: round(flops / 1e9, 1) for name, flops in counted.items()}
    assert found == {"256x256": 272.7, "512x512": 1116.7, "text": 45.1}
