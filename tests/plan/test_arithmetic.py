"""The pure functions, against definitions, brute force and simulation."""

import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from bench.kit.roots import encoding_record
from plan.arithmetic import costs, restarts, scaling
from shards.format.buckets import Bucket
from shards.format.text import TextLatents
from shards.format.towers import ImageStorage, TextStorage
from shards.root.writing import Caption, PartWriter, Sample

positive = st.floats(1e-3, 1e6)
counts = st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024])
machines = st.builds(
    scaling.Machine,
    gpus_per_node=st.sampled_from([1, 4, 8]),
    link=st.floats(1e10, 1e12),
    network=st.floats(1e9, 1e12),
    memory=st.floats(1e12, 1e13),
    data_per_node=st.floats(1e8, 1e11),
    data_total=st.floats(1e9, 1e12),
)
steps = st.builds(
    scaling.Step,
    global_batch_size=st.sampled_from([1024, 2048, 4096]),
    microbatch_size=st.sampled_from([1, 4, 16, 64]),
    num_parameters=st.integers(10**6, 10**10),
    gradient_bytes=st.sampled_from([2, 4]),
    sample_bytes=st.floats(1e3, 1e6),
    bucket_bytes=st.floats(1e8, 1e12),
    backward=st.sampled_from([((1.0, 1.0),), ((0.1, 0.6), (0.9, 0.4)), ((0.5, 0.0), (0.0, 0.5), (0.5, 0.5))]),
)
image_seconds = st.floats(1e-4, 1)


@given(image_seconds, steps, counts, machines)
def test_a_step_is_never_faster_than_its_bottleneck(
    seconds: float, step: scaling.Step, gpus: int, machine: scaling.Machine
) -> None:
    time = scaling.step_time(seconds, step, gpus, machine)
    busiest = {"compute": time.compute, "gradient traffic": time.gradients, "data rate": time.data}
    assert busiest[time.bottleneck] == max(busiest.values())
    assert time.total >= max(time.compute, time.data)
    assert time.total <= time.compute + time.gradients + time.data


@given(image_seconds, steps, counts, machines)
def test_calibrating_undoes_predicting(seconds: float, step: scaling.Step, gpus: int, machine: scaling.Machine) -> None:
    time = scaling.step_time(seconds, step, gpus, machine)
    assume(time.data < time.total)  # else the rate says nothing about computing
    rate = step.global_batch_size / gpus / time.total
    assert scaling.calibrate(rate, step, gpus, machine) == pytest.approx(seconds, rel=1e-6)


@given(image_seconds, steps, counts, machines)
def test_twice_the_gpus_never_cost_less(
    seconds: float, step: scaling.Step, gpus: int, machine: scaling.Machine
) -> None:
    one, two = (scaling.step_time(seconds, step, count, machine).total * count for count in (gpus, 2 * gpus))
    # Within a node that is not full yet, two GPUs halve what each must read into it.
    assume(gpus >= machine.gpus_per_node)
    assume(machine.network <= machine.link)
    assert two >= one * (1 - 1e-9)


@given(image_seconds, st.floats(1, 10), steps, counts, machines)
def test_slower_images_never_make_faster_steps(
    seconds: float, factor: float, step: scaling.Step, gpus: int, machine: scaling.Machine
) -> None:
    times = [scaling.step_time(value, step, gpus, machine).total for value in (seconds, seconds * factor)]
    assert times[0] <= times[1] * (1 + 1e-9)


@pytest.mark.parametrize(
    "backward, traffic, num_buckets, exposed",
    [
        (3.0, 0.0, 4, 0.0),
        (3.0, 2.0, 1, 2.0),  # all of it is ready when the backward pass ends, and no sooner
        (3.0, 2.0, 4, 0.5),  # hidden but for the last bucket
        (3.0, 3.0, 3, 1.0),  # each bucket goes as the next is made
        (2.0, 8.0, 4, 6.5),  # the network is busy from the first bucket on
    ],
)
def test_what_overlap_leaves_of_the_traffic(backward: float, traffic: float, num_buckets: int, exposed: float) -> None:
    step = scaling.Step(64, 8, 100, 4, 1.0, bucket_bytes=400 / num_buckets)
    assert scaling.exposed_seconds(backward, traffic, step) == pytest.approx(exposed)


def test_weights_that_the_backward_pass_comes_to_late_travel_unhidden() -> None:
    early, late = (
        scaling.Step(64, 8, 100, 4, 1.0, bucket_bytes=40, backward=blocks)
        for blocks in (((1.0, 0.1), (0.0, 0.9)), ((0.0, 0.9), (1.0, 0.1)))
    )
    assert scaling.exposed_seconds(1.0, 0.5, early) == 0
    assert scaling.exposed_seconds(1.0, 0.5, late) == pytest.approx(0.41)
    assert [scaling.passed_at(late.backward, share) for share in (0.0, 0.5, 1.0)] == pytest.approx([0.9, 0.95, 1.0])


def test_splitting_weights_within_a_node_pays_where_the_optimizer_is_a_large_part() -> None:
    """AdamW's traffic falls to an eighth; gathers hide behind the arithmetic, while there is any."""
    machine = scaling.Machine(8, link=2e11, network=1e11, memory=1e12, data_per_node=1e12, data_total=1e14)
    step = scaling.Step(2048, 64, 10**9, 4, 1.0)
    for gpus, seconds in ((128, 0.01), (2048, 0.0001)):
        whole, split = (scaling.step_time(seconds, step, gpus, machine, is_split=on) for on in (False, True))
        saved = 7 / 8 * 28e9 / 1e12
        beyond = max(0.0, 7 / 8 * 8e9 / 2e11 - 2048 / gpus * seconds)
        assert whole.total - split.total == pytest.approx(saved - beyond)
    one_node = scaling.step_time(0.01, step, 8, machine, is_split=True)
    assert one_node.gradients == one_node.exposed == 0


def test_encoding_online_hides_no_gradients() -> None:
    machine = scaling.Machine(8, link=1e9, network=1e9, memory=1e12, data_per_node=1e12, data_total=1e12)
    step = scaling.Step(64, 8, 10**6, 4, 1e5)
    plain, online = (scaling.step_time(0.01, step, 8, machine, encode_seconds=seconds) for seconds in (0, 0.02))
    assert online.compute - plain.compute == pytest.approx(8 * 0.02)
    assert online.exposed == plain.exposed


def test_calibrating_refuses_what_the_bandwidths_forbid() -> None:
    machine = scaling.Machine(8, link=1e9, network=1e9, memory=1e12, data_per_node=1e12, data_total=1e12)
    step = scaling.Step(512, 64, 10**9, 4, 1e5)
    with pytest.raises(ValueError, match=r"512 images on 8 GPUs was measured at 0.064 s, and by the stated bandwidths"):
        scaling.calibrate(1000, step, 8, machine)


@pytest.mark.parametrize(
    "gpus, seconds",
    [
        (1, 0),
        (2, 1),  # each GPU sends half of the sum, twice: (n - 1) / n × 2
        (8, 1.75),
        (16, 18.75),  # 2 × 15 / 16 over the ten times slower network
    ],
)
def test_all_reduce(gpus: int, seconds: float) -> None:
    machine = scaling.Machine(8, link=1e9, network=1e8, memory=1, data_per_node=1, data_total=1)
    assert scaling.all_reduce_seconds(1e9, gpus, machine) == pytest.approx(seconds)


@given(st.floats(1, 1200), st.floats(3600, 3e6), st.floats(0, 3600))
def test_daly_interval_is_within_a_permille_of_the_best(checkpoint: float, between: float, restart: float) -> None:
    assume(checkpoint < between / 10)

    def cost(interval: float) -> float:
        return restarts.expected_time(1, interval, checkpoint, restart, between)

    daly = restarts.best_interval(checkpoint, between)
    brute_force = min(cost(daly * 1.02**power) for power in range(-100, 101))
    assert cost(daly) <= brute_force * 1.001
    assert cost(daly) <= cost(restarts.young_interval(checkpoint, between)) * 1.001


def test_daly_interval_where_checkpoints_outlast_the_machine() -> None:
    assert restarts.best_interval(200, 100) == 100


@pytest.mark.parametrize("checkpoint, between", [(0, 1), (1, 0), (-1, 1)])
def test_intervals_need_positive_times(checkpoint: float, between: float) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        restarts.best_interval(checkpoint, between)


def test_expected_time_needs_work() -> None:
    with pytest.raises(ValueError, match="work 0 and interval 1 must be positive"):
        restarts.expected_time(0, 1, 1, 1, 1)


def test_expected_time_is_what_a_simulation_finds() -> None:
    interval, checkpoint, restart, between, segments = 50.0, 5.0, 10.0, 100.0, 40_000
    rng = random.Random(0)

    def span_without_failure(length: float) -> float:
        """Time until a span of `length` passes uninterrupted, each failure costing a restart that may fail too."""
        elapsed = 0.0
        while (failure := rng.expovariate(1 / between)) < length:
            elapsed += failure
            while (failure := rng.expovariate(1 / between)) < restart:
                elapsed += failure
            elapsed += restart
        return elapsed + length

    simulated = sum(span_without_failure(interval + checkpoint) for _ in range(segments)) / segments
    predicted = restarts.expected_time(interval, interval, checkpoint, restart, between)
    assert simulated == pytest.approx(predicted, rel=0.02)


def test_expected_time_can_be_for_ever() -> None:
    assert restarts.expected_time(1, 1e6, 1, 1, 1) == math.inf


@given(positive, st.floats(0, 100), st.floats(0, 100))
def test_storing_for_nothing_pays_from_the_first_pass(encode: float, storage: float, more: float) -> None:
    assert costs.break_even_passes(encode, 0, encode) == 1
    assert costs.break_even_passes(encode, storage + more, encode) >= costs.break_even_passes(encode, storage, encode)


def test_speedup_is_per_doubling() -> None:
    assert costs.speedup_per_doubling(8, 2, 8, 32) == 2
    assert costs.speedup_per_doubling(8, 8, 8, 32) == 1


def test_egress_counts_other_regions() -> None:
    assert costs.egress_bytes(100, {"here": 0.7, "there": 0.2, "beyond": 0.1}, "here") == pytest.approx(30)


def test_checkpoint_bytes() -> None:
    assert costs.checkpoint_bytes(865_910_724, ema=False) == 10_390_928_688
    assert costs.checkpoint_bytes(865_910_724, ema=True) == 13_854_571_584


@pytest.mark.parametrize("trim", [False, True])
@pytest.mark.parametrize("storage", ["float16", "float8"])
@pytest.mark.parametrize("image_storage", ["float16", "int8"])
def test_sample_bytes_are_those_of_a_written_part(
    image_storage: ImageStorage, storage: TextStorage, trim: bool, tmp_path: Path
) -> None:
    num_samples, tokens, width = 50, 20, 1024
    written = part_bytes(tmp_path / "part", num_samples, tokens, width, storage, trim, image_storage)
    (tower,) = encoding_record(77, width, storage=storage, trim=trim).texts.values()
    planned = costs.sample_bytes(8, (32, 32), costs.text_bytes(tower, tokens), 21, image_storage, channels=4)
    assert 0 <= written - num_samples * planned < 1000  # the file's own head


def test_a_small_sample_is_as_small_as_is_said(tmp_path: Path) -> None:
    """256 px of Stable Diffusion 2 and a caption of 20 tokens: 174 kB as float16, under 30 kB with all its moments."""
    assert part_bytes(tmp_path / "exact", 50, 20, 1024, "float16", False, "float16") / 50 > 174_000
    assert part_bytes(tmp_path / "small", 50, 20, 1024, "float8", True, "int8") / 50 < 30_000
    mean = part_bytes(tmp_path / "mean", 50, 20, 1024, "float8", True, "int8", posterior="mean") / 50
    assert mean < 25_000


def test_large_text_towers_are_small_where_they_are_masked(tmp_path: Path) -> None:
    """512 px of a 16-channel autoencoder with T5-XXL and a pooled CLIP: masked and trimmed, and as FLUX has it."""
    assert 205_000 < t5_bytes(tmp_path / "masked", "float8", True, "int8") < 220_000
    assert 4_400_000 < t5_bytes(tmp_path / "flux", "float16", False, "float16") < 4_500_000


def t5_bytes(folder: Path, storage: TextStorage, trim: bool, image_storage: ImageStorage) -> float:
    """Of one such sample, with all moments and 20 real tokens of 512."""
    record = encoding_record(512, 4096, storage=storage, trim=trim, masked=trim, class_name="T5EncoderModel")
    channels = {"channels": 16, "scale": (1.0,) * 16, "shift": (0.0,) * 16, "storage": image_storage}
    pooled = encoding_record(77, 768, storage="float16", states=False, pooled=768).texts["text"]
    texts = {"t5": record.texts["text"], "clip": pooled}
    image = record.image.model_copy(update=channels)
    encoding = record.model_copy(update={"image": image, "texts": texts})
    writer = PartWriter(folder, encoding, Bucket(512, 512))
    latents = {
        "t5": TextLatents(torch.zeros(512, 4096), 20),
        "clip": TextLatents(None, 20, torch.zeros(768)),
    }
    caption = Caption("a red square in front of a blue wall, oil on canvas", latents, frozenset())
    sample = Sample("000000042", [caption], torch.zeros(32, 64, 64), (0, 0, 0, 0), np.zeros(4, np.float32))
    for _ in range(4):
        writer.write(sample)
    writer.finish()
    return (folder / "shard.00000.mds").stat().st_size / 4


def part_bytes(
    folder: Path,
    num_samples: int,
    tokens: int,
    width: int,
    storage: TextStorage,
    trim: bool,
    image_storage: ImageStorage,
    posterior: str = "moments",
) -> int:
    """Bytes of the MDS file of a part of such samples."""
    encoding = encoding_record(77, width, storage=storage, trim=trim)
    image = encoding.image.model_copy(update={"storage": image_storage, "posterior": posterior})
    encoding = encoding.model_copy(update={"image": image})
    writer = PartWriter(folder, encoding, Bucket(256, 256))
    latents = TextLatents(torch.zeros(77, width), tokens)
    for _ in range(num_samples):
        sample = Sample(
            key="000000042",
            captions=[Caption("a red square", {"text": latents}, frozenset())],
            image_latents=torch.zeros(image.num_planes, 32, 32),
            size=(0, 0, 0, 0),
            scores=np.zeros(4, np.float32),
        )
        writer.write(sample)
    writer.finish()
    return (folder / "shard.00000.mds").stat().st_size
