"""The figures of the fault suite, printed at its end and written to runs/faults/precompute.json (or $FAULTS_REPORT)."""

import json
import os
import platform
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

REPORT = Path(os.environ.get("FAULTS_REPORT", "runs/faults/precompute.json"))


@pytest.fixture(scope="session")
def seed() -> int:
    """Seed of everything random in the suite; $FAULTS_SEED sets a different one."""
    return int(os.environ.get("FAULTS_SEED", "0"))


@pytest.fixture(scope="session")
def report(request: pytest.FixtureRequest, seed: int) -> Iterator[dict[str, object]]:
    """Section → figures. Those of the long suite are kept; those of the short form are only printed."""
    sections: dict[str, object] = {}
    yield sections
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    figures = {"date": datetime.now(UTC).date().isoformat(), "machine": machine, "seed": seed, **sections}
    text = json.dumps(figures, indent=2)
    if request.config.getoption("-m") != "not slow":
        REPORT.parent.mkdir(parents=True, exist_ok=True)
        REPORT.write_text(text + "\n")
    print(f"\n{text}", flush=True)
