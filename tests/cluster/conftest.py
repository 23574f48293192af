"""Fixtures of the fleet's tests."""

import pytest

from tests.cluster.played import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Simulated time, because the fleet sleeps while nothing is due."""
    return Clock(monkeypatch)
