"""The seed of the fault suite."""

import os

import pytest


@pytest.fixture(scope="session")
def seed() -> int:
    """Seed of everything random in the suite; $FAULTS_SEED sets a different one."""
    return int(os.environ.get("FAULTS_SEED", "0"))
