"""Launches of one run, interleaved call by call, on both kinds of storage; and mutants that this must catch."""

from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from typing import Any

import pytest

from tests.train.run.lease import mutants, scenarios
from tests.train.run.lease.machines import FolderMachine, LeaseMachine, StoreMachine, patch_modules
from tests.train.run.lease.mutants import folder_mutant, store_mutant

MACHINES = [StoreMachine, FolderMachine]
Scenario = Callable[[Any], None]
FAILURES = (
    "was overwritten|took the run over from itself|two lineages|was lost|is not complete|superseded launch changed|"
    "made no progress"
)


@pytest.fixture(autouse=True)
def _simulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patches:
        patch_modules(patches)
        yield


@pytest.mark.heavy
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    "seeds", [range(20), pytest.param(range(20, 3000), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_a_run_has_one_lineage(machine: type[LeaseMachine], seeds: range) -> None:
    for seed in seeds:
        machine().play(partial(machine.walk, rng=Random(seed)))


@pytest.mark.parametrize(
    ("machine", "scenario"),
    [
        *((StoreMachine, scenario) for scenario in [*scenarios.ANY, *scenarios.STORE]),
        *((FolderMachine, scenario) for scenario in [*scenarios.ANY, *scenarios.FOLDER]),
    ],
)
def test_a_scenario_ends_well(machine: type[LeaseMachine], scenario: Scenario) -> None:
    machine().play(scenario)


@pytest.mark.parametrize(
    ("mutant", "scenario"),
    [
        (store_mutant(backend=mutants.Overwriting), scenarios.claim_the_same_number),
        (store_mutant(backend=mutants.Forgetful), scenarios.lose_the_reply_to_create),
        (store_mutant(backend=mutants.Trusting), scenarios.save_while_the_successor_starts),
        (store_mutant(backend=mutants.Early), scenarios.save_while_the_successor_starts),
        (store_mutant(backend=mutants.Fenceless), scenarios.run_alone),
        (store_mutant(backend=mutants.Dropping), scenarios.check_after_each_call),
        (store_mutant(remote=mutants.StateFirst), scenarios.check_after_each_call),
        (store_mutant(remote=mutants.PlainNames), scenarios.upload_after_the_successor_saved),
        (store_mutant(remote=mutants.StateLast), scenarios.die_during_a_removal),
        (folder_mutant(mutants.OverwritingFolder), scenarios.claim_the_same_number_in_a_folder),
        (folder_mutant(mutants.ClaimsFirst), scenarios.take_over_before_the_staging_folder_exists),
        (folder_mutant(mutants.FencelessFolder), scenarios.publish_after_the_successor_saved),
        (folder_mutant(mutants.FencesOne), scenarios.publish_after_an_interrupted_takeover),
        (folder_mutant(mutants.TrustingFolder), scenarios.publish_after_the_successor_chose),
        (mutants.RestoresItsFolder, scenarios.complete_after_the_successor_saved),
        (mutants.ReplacesUnfenced, scenarios.publish_after_the_successor_saved),
        (mutants.CopiesIntoPlace, scenarios.check_after_each_call),
        (mutants.RemovesInPlace, scenarios.check_after_each_call),
    ],
)
def test_a_mistake_is_found(mutant: type[LeaseMachine], scenario: Scenario) -> None:
    with pytest.raises(AssertionError, match=FAILURES):
        mutant().play(scenario)
