"""Assumptions of the planner's scaling model, on gloo ranks: when and in which order gradients are all-reduced."""

import json
from itertools import accumulate, pairwise
from pathlib import Path

import pytest

from tests import ranks


@pytest.mark.parametrize("num_processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_buckets_travel_one_after_the_other_while_the_backward_pass_goes_on(num_processes: int, tmp_path: Path) -> None:
    program = "tests.train.model.overlap_ranks:record"
    processes = ranks.start(tmp_path / "log", [str(tmp_path)], num_processes, program=program)
    codes = ranks.wait(processes, 300)
    assert codes == [0] * num_processes, (tmp_path / "log").read_text()
    recorded = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(num_processes)]
    assert all(events == recorded[0] for events in recorded)
    kinds = [kind for kind, _ in recorded[0]]
    border = kinds.index("last microbatch")
    assert "sent" not in kinds[:border]  # gradients of the first microbatch are only accumulated
    last = recorded[0][border + 1 :]
    ready = list(accumulate(size if kind == "ready" else 0 for kind, size in last))
    sent = list(accumulate(size if kind == "sent" else 0 for kind, size in last))
    places = [place for place, (kind, _) in enumerate(last) if kind == "sent"]
    assert len(places) > 4 and sent[-1] == ready[-1]
    # each bucket is sent once its gradients are complete, the first long before the backward pass ends
    assert ready[places[0]] < 0.5 * ready[-1] and ready[places[-1]] == ready[-1]
    for place in places:
        assert sent[place] <= ready[place]
    for before, after in pairwise(places):
        assert ready[after] > ready[before]
