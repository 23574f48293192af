"""One loss curve for every number of processes, nodes and workers and every microbatch size."""

import random
import re
from pathlib import Path

import pytest

from bench.kit.roots import make_root
from tests import ranks
from tests.fixtures import Record
from tests.runs import TRANSFORMER, UNET, curve, train_fields, write_config
from train.run.reporting.json_lines import read_json_lines

LAYOUTS = [
    # processes, nodes, workers, microbatch
    (1, 1, 0, 32),  # the reference
    (1, 1, 1, 32),
    (1, 1, 4, 32),
    (1, 1, 4, 4),
    (2, 1, 0, 8),
    (2, 1, 4, 16),
    (4, 1, 1, 4),
    (2, 2, 1, 16),
    (4, 2, 0, 8),
]
SHORT = [0, 1, 3, 8]
"""The layouts of `make test`."""
SIZES = [(1, 1), (2, 1), (3, 1), (3, 3), (4, 2), (6, 3), (6, 6), (12, 12)]
"""Layouts of processes and machines that share a global batch of 12 with 4 canonical nodes."""


BUCKETS = {
    # samples per part and passes per epoch; they give 8, 3, 2 and 1 global batches
    "64x64": ([13, 29, 17, 23, 19, 11], 2.3),
    "128x64": ([7, 12, 9], 3.5),
    "64x192": ([15, 1, 6], 3.0),
    "192x128": ([5, 14], 2.0),
}
"""A square bucket and three aspect buckets, one of odd size: latents of 8x8, 8x16, 24x8 and 16x24."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("aspect") / "root", {name: parts for name, (parts, _) in BUCKETS.items()})


def train(folder: Path, root: Path, network: Path, layout: tuple[int, int, int, int], steps: int) -> Path:
    """Train on that layout and return the run folder."""
    processes, nodes, workers, microbatch = layout
    name = f"{processes}-processes-{nodes}-nodes-{workers}-workers-{microbatch}"
    streams = [{"root": str(root), "bucket": name, "weight": weight} for name, (_, weight) in BUCKETS.items()]
    fields = train_fields(
        root,
        folder / name,
        network,
        max_steps=steps,
        global_batch_size=32,
        microbatch_size=microbatch,
        data={"streams": streams, "num_workers": workers},
        checkpoint={"every": steps},
        collective_timeout=120.0,
    )
    ranks.run(folder / f"{name}.log", ["--config", str(write_config(folder, fields))], processes, nodes)
    return folder / name


def losses_by_quarter(run_dir: Path) -> list[dict[str, float]]:
    """Return each step's loss per quarter of the timesteps, without quarters that have no sample."""
    rows = read_json_lines(run_dir / "metrics.jsonl")
    return [{name: loss for name, loss in row["loss_by_quarter"].items() if loss is not None} for row in rows]


def largest_difference(found: list[float], expected: list[float]) -> float:
    """Return the largest relative difference of losses over the steps of both runs."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("steps", "layouts", "network"),
    [(16, SHORT, TRANSFORMER), pytest.param(200, range(len(LAYOUTS)), UNET, marks=pytest.mark.slow)],
    ids=["16-steps", "200-steps"],
)
def test_one_curve(
    steps: int, layouts: list[int], network: Path, root: Path, tmp_path: Path, record_property: Record
) -> None:
    expected, expected_quarters = None, None
    for layout in (LAYOUTS[i] for i in layouts):
        if layout[1] > 1 and not ranks.nodes_can_be_simulated():
            record_property("left out", "several nodes, because this process may not mount a /dev/shm for each")
            continue
        run_dir = train(tmp_path, root, network, layout, steps)
        found, quarters = curve(run_dir), losses_by_quarter(run_dir)[:20]
        assert len(found[0]) == steps
        expected, expected_quarters = expected or found, expected_quarters or quarters
        assert found[1] == expected[1]  # the same samples at each step
        assert quarters == [pytest.approx(losses, rel=1e-5) for losses in expected_quarters]
        if layout[0] == 1 and layout[3] == 32:
            assert found[0] == expected[0]  # only the number of workers differs, so the curve must be bit-exact
        first, all_of_them = (largest_difference(found[0][:n], expected[0][:n]) for n in (20, steps))
        record_property(
            f"{layout[0]} processes on {layout[1]} nodes, {layout[2]} workers, microbatch {layout[3]}",
            f"largest relative difference {first:.1e} over 20 steps, {all_of_them:.1e} over {steps}",
        )
        assert first <= 1e-5 and all_of_them <= 1e-3


@pytest.mark.parametrize(
    ("launches", "network"), [(2, TRANSFORMER), pytest.param(24, UNET, marks=pytest.mark.slow)], ids=["2", "24"]
)
def test_a_run_requeued_with_random_numbers_of_ranks_has_one_curve(
    launches: int, network: Path, root: Path, tmp_path: Path, record_property: Record
) -> None:
    """Every launch has a different number of processes and machines. 3 machines do not divide 4 canonical nodes, and a
    resume on 2 machines is reported once."""
    rng = random.Random(launches)
    sizes = [(3, 3), (4, 2), *(rng.choice(SIZES) for _ in range(launches - 2))]
    if not ranks.nodes_can_be_simulated():
        sizes = [(processes, 1) for processes, _ in sizes]
    streams = [{"root": str(root), "bucket": name, "weight": weight} for name, (_, weight) in BUCKETS.items()]
    changes = {"global_batch_size": 12, "microbatch_size": 3, "data": {"streams": streams}, "collective_timeout": 120.0}
    steps, curves = 2 * launches, []
    for name, schedule in (("alone", [(1, 1)]), ("requeued", sizes)):
        for number, (processes, nodes) in enumerate(schedule, start=1):
            max_steps = steps * number // len(schedule)
            fields = train_fields(root, tmp_path / name, network, max_steps=max_steps, **changes)
            output = ranks.run(
                tmp_path / f"{name}.log", ["--config", str(write_config(tmp_path, fields))], processes, nodes
            )
        curves.append(curve(tmp_path / name))
    ends = [steps * number // launches for number in range(1, launches)]
    begun = [int(step) for step in re.findall(r"resuming \S+ after step (\d+)", " ".join(output.split()))]
    done = sum(end - begin for begin, end in zip([0, *begun], [*ends, steps], strict=True))
    assert done == steps  # a launch that stops on request loses no step
    assert len(curves[0][0]) == steps and curves[0][1] == curves[1][1]
    difference = largest_difference(curves[1][0], curves[0][0])
    record_property(
        f"{launches} launches of {sizes}",
        f"goodput (steps kept ÷ steps done) {steps / done:.1%}, largest relative difference {difference:.1e} over "
        f"{steps} steps",
    )
    assert difference <= 1e-5
