"""The time of a step on any number of GPUs: properties, and the inverse function."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from plan.arithmetic import scaling
from train.model.config import Sharding

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
    sharding=st.sampled_from(["none", "grad_op", "full"]),
    group=st.sampled_from([None, 2, 8]),
    backward=st.sampled_from([((1.0, 1.0),), ((0.1, 0.6), (0.9, 0.4)), ((0.5, 0.0), (0.0, 0.5), (0.5, 0.5))]),
)
image_seconds = st.floats(1e-4, 1)


@given(image_seconds, steps, counts, machines)
def test_a_step_is_never_faster_than_its_bottleneck(
    seconds: float, step: scaling.Step, gpus: int, machine: scaling.Machine
) -> None:
    time = scaling.step_time(seconds, step, gpus, machine)
    busiest = {"compute": time.compute, "traffic between GPUs": time.traffic, "data rate": time.data}
    assert busiest[time.bottleneck] == max(busiest.values())
    assert time.total >= max(time.compute, time.data)
    assert time.total <= time.compute + time.traffic + time.data


@given(image_seconds, steps, counts, machines)
def test_calibrating_undoes_predicting(seconds: float, step: scaling.Step, gpus: int, machine: scaling.Machine) -> None:
    faster, time = (scaling.step_time(each, step, gpus, machine) for each in (0.99 * seconds, seconds))
    assume(time.data < time.total)  # otherwise the rate does not depend on compute
    assume(faster.total < 0.9999 * time.total)
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
    # With a second node, traffic between groups moves from the links, which groups also use, to the network.
    assume(gpus > machine.gpus_per_node or step.group_size(gpus) in (1, gpus))
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
        (3.0, 2.0, 1, 2.0),  # a single bucket is ready only when the backward pass ends
        (3.0, 2.0, 4, 0.5),  # all buckets but the last are hidden
        (3.0, 3.0, 3, 1.0),  # each bucket is sent while the next one is computed
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
    assert scaling.bucket_ready_times(late.backward, 2) == pytest.approx([0.95, 1.0])


def test_splitting_weights_within_a_node_pays_where_the_optimizer_is_a_large_part() -> None:
    """AdamW's traffic falls to an eighth, and gathers overlap with compute as long as there is enough compute."""
    machine = scaling.Machine(8, link=2e11, network=1e11, memory=1e12, data_per_node=1e12, data_total=1e14)
    step = scaling.Step(2048, 64, 10**9, 4, 1.0)
    sharded = replace(step, sharding="full", group=8)
    whole, split = (scaling.step_time(0.01, each, 128, machine) for each in (step, sharded))
    assert whole.compute - split.compute == pytest.approx(7 / 8 * 28e9 / 1e12)
    split = scaling.step_time(0.0001, replace(sharded, microbatch_size=1), 128, machine)
    assert split.exposed == pytest.approx(16 * 7 / 8 * 8e9 / 2e11 - 16 * 0.0001)
    one_node = scaling.step_time(0.01, sharded, 8, machine)
    assert one_node.exposed == 0


@pytest.mark.parametrize("sharding, num_bytes", [("grad_op", 6e9), ("full", 8e9)])
def test_sharding_across_all_nodes_moves_weights_over_the_network_in_every_microbatch(
    sharding: Sharding, num_bytes: float
) -> None:
    """One bfloat16 all-gather (`full`: two) and one float32 reduce-scatter, but no all-reduce."""
    machine = scaling.Machine(8, link=2e11, network=1e10, memory=1e12, data_per_node=1e12, data_total=1e14)
    step = scaling.Step(2048, 16, 10**9, 4, 1.0, sharding=sharding)
    time = scaling.step_time(1e-9, step, 32, machine)
    assert time.exposed == pytest.approx(time.traffic, rel=1e-4)
    assert time.traffic == pytest.approx(4 * 31 / 32 * num_bytes / 1e10)
    assert time.compute == pytest.approx(28e9 / 1e12 / 32, rel=1e-4)


def test_encoding_online_hides_no_gradients() -> None:
    machine = scaling.Machine(8, link=1e9, network=1e9, memory=1e12, data_per_node=1e12, data_total=1e12)
    step = scaling.Step(64, 8, 10**6, 4, 1e5)
    plain, online = (scaling.step_time(0.01, step, 8, machine, encode_seconds=seconds) for seconds in (0, 0.02))
    assert online.compute - plain.compute == pytest.approx(8 * 0.02)
    assert online.exposed == plain.exposed


def test_calibrating_refuses_what_the_bandwidths_forbid() -> None:
    machine = scaling.Machine(8, link=1e9, network=1e9, memory=1e12, data_per_node=1e12, data_total=1e12)
    step = scaling.Step(512, 64, 10**9, 4, 1e5)
    with pytest.raises(ValueError, match=r"512 images on 8 GPUs was measured at 0.064 s, but at the given bandwidths"):
        scaling.calibrate(1000, step, 8, machine)


@pytest.mark.parametrize(
    "gpus, group, seconds",
    [
        (1, 1, 0),
        (2, 1, 1),  # each GPU sends half of the sum, twice: (n - 1) / n × 2
        (8, 1, 1.75),
        (16, 1, 18.75),  # 2 × 15 / 16 over the ten times slower network
        (8, 8, 0),
        (8, 2, 0.75),  # 2 × 3 / 4 of each GPU's half
        (16, 8, 10),  # 2 × 1 / 2 of every byte leaves the node
        (16, 2, 17.5),  # 2 × 7 / 8
        (32, 16, 5),  # a node has half of a group's gradients
    ],
)
def test_all_reduce(gpus: int, group: int, seconds: float) -> None:
    machine = scaling.Machine(8, link=1e9, network=1e8, memory=1, data_per_node=1, data_total=1)
    assert scaling.all_reduce_seconds(1e9, gpus, machine, group) == pytest.approx(seconds)


def test_groups_larger_than_a_node_share_the_network_with_each_other() -> None:
    """Two groups of two nodes: the traffic within a group and between groups adds up."""
    machine = scaling.Machine(8, link=1e12, network=1e10, memory=1e12, data_per_node=1e12, data_total=1e14)
    step = scaling.Step(2048, 64, 10**9, 4, 1.0, sharding="full", group=16)
    within, between = 15 / 16 * 8e9 / 1e10, 4e9 / 2 / 1e10
    assert scaling.step_time(1.0, step, 32, machine).traffic == pytest.approx(within + between)
    beside = scaling.step_time(1.0, replace(step, group=8), 32, machine)
    assert beside.traffic == pytest.approx(2 * 3 / 4 * 4e9 / 1e10)
