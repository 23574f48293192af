"""How many workers nodes hold, what leaves GPUs unused, and how many units a fleet hands out: without Ray."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from cluster.fleet import Done, Failed, FleetConfig, UnderWay
from cluster.nodes import LOOK_SECONDS, Resources, ResourcesConfig, Watch, places, shortage
from tests.cluster.played import Clock, Outcome, RealClock, TimedCluster, error, make_fleet


def held(has: Resources, needs: Resources) -> int:
    """The obvious answer: workers put on one by one, in thousandths, each on the first GPU that has room."""
    gpus = [1000] * int(has.get("GPU", 0))
    rest = {name: round(amount * 1000) for name, amount in has.items() if name != "GPU"}
    wanted = {name: round(amount * 1000) for name, amount in needs.items()}
    gpu, count = wanted.pop("GPU"), 0
    while True:
        room = [i for i, left in enumerate(gpus) if left >= min(gpu, 1000)][: max(1, gpu // 1000)]
        if gpu and len(room) < max(1, gpu // 1000):
            return count
        if any(rest.get(name, 0) < amount for name, amount in wanted.items()):
            return count
        for i in room if gpu else []:
            gpus[i] -= min(gpu, 1000)
        for name, amount in wanted.items():
            rest[name] -= amount
        count += 1


@given(
    st.sampled_from([0, 0.1, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 1, 2, 3]),
    st.sampled_from([0.1, 0.5, 1, 4, 8]),
    st.integers(0, 8),
    st.integers(1, 64),
    st.sampled_from([0.5, 1, 3]),
)
def test_a_node_holds_as_many_as_are_put_on_it_one_by_one(
    gpu: float, cpu: float, gpus: int, cpus: int, encoders: float
) -> None:
    has: Resources = {"GPU": gpus, "CPU": cpus, "encoder": 4}
    needs: Resources = {"GPU": gpu, "CPU": cpu, "encoder": encoders}
    assert min(places(has, needs).values()) == held(has, needs)


def test_what_leaves_gpus_unused() -> None:
    needs = ResourcesConfig(num_gpus=1, num_cpus=8).needs
    assert shortage({"GPU": 8, "CPU": 52}, needs) == "6 of 8 GPUs usable: CPUs"
    assert shortage({"GPU": 8, "CPU": 64}, needs) is None and shortage({"CPU": 2}, needs) is None
    assert shortage({"GPU": 8, "CPU": 4}, needs) == "0 of 8 GPUs usable: CPUs"
    both = ResourcesConfig(num_gpus=0.5, num_cpus=1, resources={"encoder": 1}).needs
    assert shortage({"GPU": 8, "CPU": 8, "encoder": 10}, both) == "4 of 8 GPUs usable: CPUs, encoder"
    assert shortage({"GPU": 1, "CPU": 8}, ResourcesConfig(num_gpus=2, num_cpus=1).needs) is None  # too few GPUs
    assert shortage({"GPU": 8, "CPU": 1}, ResourcesConfig(num_gpus=0, num_cpus=1).needs) is None


def test_a_node_that_is_short_is_named_once_and_when_it_changes() -> None:
    watch = Watch(ResourcesConfig(num_gpus=1, num_cpus=8))
    alive: dict[str, Resources] = {
        "f00": {"GPU": 8, "CPU": 52, "node:10.0.0.7": 1, "node:__internal_head__": 1},
        "f01": {"GPU": 8, "CPU": 64},
    }
    assert watch.look(alive) == "node 10.0.0.7: 6 of 8 GPUs usable: CPUs" and watch.places == 14
    assert watch.look(alive) is None
    alive["f02"] = {"GPU": 4, "CPU": 8}
    assert watch.look(alive) == "node f02: 1 of 4 GPUs usable: CPUs" and watch.places == 15
    del alive["f00"]
    assert watch.look(alive) is None and watch.places == 9


def test_a_worker_has_whole_gpus_or_a_part_of_one() -> None:
    assert ResourcesConfig(num_gpus=0.25).num_gpus == 0.25
    with pytest.raises(ValidationError, match="a worker has whole GPUs, or a part of one"):
        ResourcesConfig(num_gpus=1.5)


def test_twice_as_many_are_under_way_as_there_are_slots_whatever_the_cluster_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """0 → 3 → 0 → 300 nodes' slots, as an autoscaler may have it; a tar takes 20 simulated seconds."""
    clock = Clock(monkeypatch)
    cluster = TimedCluster(clock, {}, lambda *_: (20, "ok"))
    sizes = [(0, 0), (100, 3), (400, 0), (500, 300)]
    fleet = iter(make_fleet(monkeypatch, cluster, map(str, range(1200)), wait_for_resources=1000))
    monkeypatch.setattr("cluster.nodes.LOOK_SECONDS", LOOK_SECONDS)
    seen: list[tuple[float, int, int]] = []
    done = 0
    for event in fleet:
        done += isinstance(event, Done)
        if isinstance(event, UnderWay):
            seen.append((clock.now - 1000, event.attempts, cluster.busy().total()))
            size = next(size for begin, size in reversed(sizes) if clock.now - 1000 >= begin)
            cluster.nodes = {str(node): {"CPU": 1.0} for node in range(size)}
    assert done == 1200
    assert {attempts for at, attempts, _ in seen if at < 100} == {8}  # what an autoscaler sees, and no more
    assert all(attempts <= 8 for at, attempts, _ in seen if at < 500)
    assert {busy for at, _, busy in seen if 110 <= at < 395} >= {3}
    assert max(busy for at, _, busy in seen if 430 <= at < 500) == 0
    assert max(attempts for _, attempts, _ in seen) == 600
    first_full = min(at for at, _, busy in seen if busy == 300)
    print(f"300 slots, tars of 20 s: 300 busy {first_full - 500:.0f} s after they came, 600 under way at most")
    assert first_full - 500 <= 5


def test_of_a_cluster_that_shrinks_no_more_are_begun_than_it_has_slots_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """300 slots become 10, as preemption has it; what was under way on the lost ones is lost and done again."""
    clock, shrinks, lost_at = Clock(monkeypatch), 90.0, 95.0
    small = {str(node) for node in range(10)}

    def act(key: str, node: str, now: float) -> tuple[float, Outcome]:
        at = now - 1000
        return (lost_at - at, error(lost=True)) if node not in small and at + 20 > lost_at else (20, "ok")

    cluster = TimedCluster(clock, {str(node): 1 for node in range(300)}, act)
    fleet = iter(make_fleet(monkeypatch, cluster, map(str, range(2200)), node_failures=1000))
    monkeypatch.setattr("cluster.nodes.LOOK_SECONDS", LOOK_SECONDS)
    seen: list[tuple[float, int, int, int]] = []
    done, lost = set(), 0
    for event in fleet:
        if isinstance(event, Done):
            done.add(event.key)
        lost += isinstance(event, Failed)
        if isinstance(event, UnderWay):
            seen.append((clock.now - 1000, event.attempts, len(cluster.given), cluster.busy().total()))
            if clock.now - 1000 >= shrinks:
                cluster.nodes = {node: {"CPU": 1.0} for node in small}
    assert done == set(map(str, range(2200))) and lost == 290
    assert max(attempts for at, attempts, _, _ in seen if at < shrinks) == 600
    looked = shrinks + LOOK_SECONDS + 1  # the fleet looks every so often, between polls
    above = [(at, attempts, begun) for at, attempts, begun, _ in seen if at >= looked and attempts > 20]
    assert above and len({begun for _, _, begun in above}) == 1, "attempts were begun while more than 20 were under way"
    after = [(attempts, busy) for at, attempts, _, busy in seen if at > above[-1][0]]
    assert after and max(attempts for attempts, _ in after) == 20 and max(busy for _, busy in after) == 10


def test_300_slots_are_busy_with_tasks_of_20_ms(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the machine's clock: the fleet's loop is the product's, and settles them one by one; Ray's part is played."""
    full: list[float] = []
    cluster = TimedCluster(RealClock(), {str(node): 1 for node in range(300)}, lambda *_: (0.02, "ok"))
    fleet = make_fleet(monkeypatch, cluster, map(str, range(3000)))
    monkeypatch.setattr("cluster.nodes.LOOK_SECONDS", LOOK_SECONDS)
    begun, done = time.monotonic(), set()
    for event in fleet:
        if cluster.most_busy == 300 and not full:
            full.append(time.monotonic() - begun)
        if isinstance(event, Done):
            done.add(event.key)
    rate = len(done) / (time.monotonic() - begun)
    assert done == set(map(str, range(3000)))
    assert cluster.most_busy == 300
    print(
        f"300 slots, tasks of 20 ms: 300 busy at once after {full[0]:.2f} s; the driver handles {rate:,.0f} tasks/s, "
        f"which keeps 300 busy with tasks of {300 / rate:.2f} s"
    )


def test_in_flight_is_a_number_or_auto() -> None:
    assert FleetConfig(max_in_flight=3).in_flight(1000) == 3
    assert FleetConfig().in_flight(0) == 8 and FleetConfig().in_flight(1000) == 2000
    assert FleetConfig().in_flight(1000, at_once=3) == 4000
    with pytest.raises(ValidationError, match="give a number from 1 on, or auto"):
        FleetConfig(max_in_flight=0)
