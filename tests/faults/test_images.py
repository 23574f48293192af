"""Hostile pictures: the outcome and memory of each, in a worker and in a child process."""

from collections import Counter
from pathlib import Path

import pytest

from precompute.pixels.decode import LimitsConfig
from precompute.pixels.isolation import Isolated
from shards.open import open_store
from tests.faults.decoders import ACCEPTED, outcome_and_memory
from tests.faults.images import hostile
from tests.fixtures import Record, encode_all, precompute_config
from tests.roots import load_tars
from tests.tiny import make_tar

pytestmark = pytest.mark.faults
LIMITS = LimitsConfig()
MOST_MEMORY = 2 << 30
"""Memory limit of a process that decodes them in sequence; the largest allowed picture has 100 megapixels."""


@pytest.fixture(scope="module")
def corpus() -> dict[str, tuple[bytes, str]]:
    return hostile()


def test_each_ends_as_expected_in_bounded_memory(corpus: dict[str, tuple[bytes, str]], record_property: Record) -> None:
    with Isolated(outcome_and_memory, LIMITS) as isolated:
        found = {name: isolated(data, LIMITS) for name, (data, _) in corpus.items()}
        assert len(isolated.children) == 1  # none died
    assert {name: outcome for name, (outcome, _) in found.items()} == {name: out for name, (_, out) in corpus.items()}
    peak = max(memory for _, memory in found.values())
    assert len(corpus) >= 40 and peak < MOST_MEMORY
    record_property(
        "hostile images",
        {
            "images": len(corpus),
            "as expected": len(found),
            "outcomes": dict(Counter(outcome for outcome, _ in found.values())),
            "peak_memory_mib": peak >> 20,
        },
    )


@pytest.mark.slow
def test_a_shard_of_nothing_else(corpus: dict[str, tuple[bytes, str]], models: Path, tmp_path: Path) -> None:
    samples = [
        (f"0000{i:05d}", {"jpg": data, "txt": name.encode()}) for i, (name, (data, _)) in enumerate(corpus.items())
    ]
    make_tar(tmp_path / "tars", "00000", samples)
    config = precompute_config(models, tmp_path / "tars", tmp_path / "root", buckets=["64x64"])
    encode_all(config)
    receipt = load_tars(open_store(config.output))[0]
    outcomes = Counter(outcome for _, outcome in corpus.values())
    assert receipt.encoded == outcomes.pop(ACCEPTED) and receipt.rejected == outcomes
