"""What the trainer has a network predict is what the family's own pipeline has it predict, and so is the loss."""

from collections.abc import Callable

import pytest

from tests.families.small import FAMILIES, Small
from tests.families.steps import Case, check_loss, check_steps, make_case


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, small: Callable[[str], Small]) -> Case:
    """Of each family."""
    return make_case(small(request.param))


def test_each_step_is_the_pipelines(case: Case) -> None:
    check_steps(case)


def test_the_loss_is_of_the_pipelines_prediction(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    check_loss(case, monkeypatch)
