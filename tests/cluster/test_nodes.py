"""How many workers fit on nodes, what leaves GPUs unused, and how many units a fleet has in flight, without Ray."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from cluster.fleet import Done, Failed, FleetConfig, UnderWay
from cluster.nodes import LOOK_SECONDS, NodeWatch, Resources, ResourcesConfig, places, shortage
from tests.cluster.played import Clock, Outcome, RealClock, TimedPool, error, make_fleet


def held(has: Resources, needs: Resources) -> int:
    """Reference: add workers one by one, in thousandths, each to the first GPU that has room."""
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
def test_places_agree_with_adding_workers_one_by_one(
    gpu: float, cpu: float, gpus: int, cpus: int, encoders: float
) -> None:
    has: Resources = {"GPU": gpus, "CPU": cpus, "encoder": 4}
    needs: Resources = {"GPU": gpu, "CPU": cpu, "encoder": encoders}
    assert min(places(has, needs).values()) == held(has, needs)


def test_shortages_that_leave_gpus_unused() -> None:
    needs = ResourcesConfig(num_gpus=1, num_cpus=8).needs
    assert shortage({"GPU": 8, "CPU": 52}, needs) == "only 6 of 8 GPUs are usable, because the node has too few CPUs"
    assert shortage({"GPU": 8, "CPU": 64}, needs) is None and shortage({"CPU": 2}, needs) is None
    assert shortage({"GPU": 8, "CPU": 4}, needs) == "only 0 of 8 GPUs are usable, because the node has too few CPUs"
    both = ResourcesConfig(num_gpus=0.5, num_cpus=1, resources={"encoder": 1}).needs
    assert (
        shortage({"GPU": 8, "CPU": 8, "encoder": 10}, both)
        == "only 4 of 8 GPUs are usable, because the node has too few CPUs and encoder"
    )
    assert (
        shortage({"GPU": 1, "CPU": 8}, ResourcesConfig(num_gpus=2, num_cpus=1).needs) is None
    )  # the node is too small, not short
    assert shortage({"GPU": 8, "CPU": 1}, ResourcesConfig(num_gpus=0, num_cpus=1).needs) is None


def test_a_shortage_is_reported_once_per_change() -> None:
    watch = NodeWatch(ResourcesConfig(num_gpus=1, num_cpus=8))
    alive: dict[str, Resources] = {
        "f00": {"GPU": 8, "CPU": 52, "node:10.0.0.7": 1, "node:__internal_head__": 1},
        "f01": {"GPU": 8, "CPU": 64},
    }
    assert (
        watch.look(alive) == "node 10.0.0.7: only 6 of 8 GPUs are usable, because the node has too few CPUs"
        and watch.places == 14
    )
    assert watch.look(alive) is None
    alive["f02"] = {"GPU": 4, "CPU": 8}
    assert (
        watch.look(alive) == "node f02: only 1 of 4 GPUs are usable, because the node has too few CPUs"
        and watch.places == 15
    )
    del alive["f00"]
    assert watch.look(alive) is None and watch.places == 9


def test_num_gpus_is_whole_or_a_fraction_of_one() -> None:
    assert ResourcesConfig(num_gpus=0.25).num_gpus == 0.25
    with pytest.raises(ValidationError, match="must be a whole number of GPUs or a fraction of one"):
        ResourcesConfig(num_gpus=1.5)


def test_twice_as_many_are_in_flight_as_there_are_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The slots go 0 → 3 → 0 → 300, as with an autoscaler. A tar takes 20 simulated seconds."""
    clock = Clock(monkeypatch)
    pool = TimedPool(clock, {}, lambda *_: (20, "ok"))
    sizes = [(0, 0), (100, 3), (400, 0), (500, 300)]
    fleet = iter(make_fleet(monkeypatch, pool, map(str, range(1200)), wait_for_resources=1000))
    monkeypatch.setattr("cluster.nodes.LOOK_SECONDS", LOOK_SECONDS)
    seen: list[tuple[float, int, int]] = []
    done = 0
    for event in fleet:
        done += isinstance(event, Done)
        if isinstance(event, UnderWay):
            seen.append((clock.now - 1000, event.attempts, pool.busy()))
            size = next(size for begin, size in reversed(sizes) if clock.now - 1000 >= begin)
            pool.nodes = {str(node): {"CPU": 1.0} for node in range(size)}
    assert done == 1200
    assert {attempts for at, attempts, _ in seen if at < 100} == {
        8
    }  # as many workers as an autoscaler sees requests for
    assert all(attempts <= 8 for at, attempts, _ in seen if at < 500)
    assert {busy for at, _, busy in seen if 110 <= at < 395} >= {3}
    assert max(busy for at, _, busy in seen if 430 <= at < 500) == 0
    assert max(attempts for _, attempts, _ in seen) == 600
    first_full = min(at for at, _, busy in seen if busy == 300)
    print(f"300 slots, tars of 20 s: 300 busy {first_full - 500:.0f} s after they appeared, at most 600 in flight")
    assert first_full - 500 <= 5


def test_after_a_cluster_shrinks_no_more_attempts_start_than_it_has_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """300 slots become 10, as with preemption. What ran on the other ones is lost and repeated."""
    clock, shrinks, lost_at = Clock(monkeypatch), 90.0, 95.0
    small = {str(node) for node in range(10)}

    def act(key: str, node: str, now: float) -> tuple[float, Outcome]:
        at = now - 1000
        return (lost_at - at, error(lost=True)) if node not in small and at + 20 > lost_at else (20, "ok")

    pool = TimedPool(clock, {str(node): 1 for node in range(300)}, act)
    fleet = iter(make_fleet(monkeypatch, pool, map(str, range(2200)), node_failures=1000))
    monkeypatch.setattr("cluster.nodes.LOOK_SECONDS", LOOK_SECONDS)
    seen: list[tuple[float, int, int, int]] = []
    done, lost = set(), 0
    for event in fleet:
        if isinstance(event, Done):
            done.add(event.key)
        lost += isinstance(event, Failed)
        if isinstance(event, UnderWay):
            seen.append((clock.now - 1000, event.attempts, len(pool.begun), pool.busy()))
            if clock.now - 1000 >= shrinks:
                pool.nodes = {node: {"CPU": 1.0} for node in small}
    assert done == set(map(str, range(2200))) and lost == 290
    assert max(attempts for at, attempts, _, _ in seen if at < shrinks) == 600
    looked = shrinks + LOOK_SECONDS + 1  # the fleet looks at the nodes at intervals
    above = [(at, attempts, begun) for at, attempts, begun, _ in seen if at >= looked and attempts > 20]
    assert above and len({begun for _, _, begun in above}) == 1, "attempts were begun while more than 20 were under way"
    after = [(attempts, busy) for at, attempts, _, busy in seen if at > above[-1][0]]
    assert after and max(attempts for attempts, _ in after) == 20 and max(busy for _, busy in after) == 10


@pytest.mark.slow
def test_300_slots_are_busy_with_tasks_of_20_ms(monkeypatch: pytest.MonkeyPatch) -> None:
    """In real time: the loop is the product's, which settles attempts one by one; Ray's part is scripted."""
    full: list[float] = []
    pool = TimedPool(RealClock(), {str(node): 1 for node in range(300)}, lambda *_: (0.02, "ok"))
    fleet = make_fleet(monkeypatch, pool, map(str, range(3000)))
    monkeypatch.setattr("cluster.nodes.LOOK_SECONDS", LOOK_SECONDS)
    begun, done = time.monotonic(), set()
    for event in fleet:
        if pool.most_busy == 300 and not full:
            full.append(time.monotonic() - begun)
        if isinstance(event, Done):
            done.add(event.key)
    rate = len(done) / (time.monotonic() - begun)
    assert done == set(map(str, range(3000)))
    assert pool.most_busy == 300
    print(
        f"300 slots, tasks of 20 ms: 300 busy at once after {full[0]:.2f} s; the driver handles {rate:,.0f} tasks/s, "
        f"which keeps 300 busy with tasks of {300 / rate:.2f} s"
    )


def test_in_flight_is_a_number_or_auto() -> None:
    assert FleetConfig(max_in_flight=3).in_flight(1000) == 3
    assert FleetConfig().in_flight(0) == 8 and FleetConfig().in_flight(1000) == 2000
    assert FleetConfig().in_flight(1000, at_once=3) == 4000
    with pytest.raises(ValidationError, match="must be at least 1, or auto"):
        FleetConfig(max_in_flight=0)
