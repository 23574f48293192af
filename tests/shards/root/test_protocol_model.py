"""The model of the commit protocol and the product's code pass the state machine, and faulty protocols fail it."""

import json
import math
from collections.abc import Callable, Iterator

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from bench.kit.receipts import synthetic_receipt
from shards.base.store import Store
from shards.format.receipts import (
    FileRecord,
    Receipt,
    active_receipts,
    parse_name,
    receipt_name,
    tombstone_name,
)
from shards.root import commit
from shards.root.commit import recall
from shards.root.committed import load_receipts
from shards.tools import clean
from tests.interleaving import REPRODUCIBLE, InThread, Program
from tests.shards.root.protocol import AGE, BUCKET, FILES, TAR, ProtocolMachine, Scratch

pytestmark = pytest.mark.heavy

FEW = settings(REPRODUCIBLE, max_examples=100, stateful_step_count=30)
MANY = settings(FEW, max_examples=3000, stateful_step_count=80, derandomize=False)


class Model(ProtocolMachine):
    """A minimal model of the protocol."""

    def attempt(self, content: str, token: str) -> Program:
        generation, found = yield from self.current()
        if found is not None:
            return self.token_of(found)
        yield from self.place(content)
        while True:
            generation, _ = yield from self.current()
            name = receipt_name(BUCKET, TAR, generation)
            data = json.dumps({"token": token, "part": f"{TAR}.{content}"}).encode()
            if (yield "create", (name, data)):
                return token
            found = yield "read", name
            if self.token_of(found) == token:
                return token
            if (yield "read", tombstone_name(BUCKET, TAR, generation)) is None:
                return self.token_of(found)

    def current(self) -> Program:
        """Return the first generation that is not recalled, and its receipt."""
        generation = 0
        while True:
            found = yield "read", receipt_name(BUCKET, TAR, generation)
            if (yield "read", tombstone_name(BUCKET, TAR, generation)) is None:
                return generation, found
            generation += 1

    def place(self, content: str) -> Program:
        """Complete the part's folder; the index is always written."""
        folder = f"{BUCKET}/{TAR}.{content}"
        for name in FILES:
            right = f"{content}:{name}".encode()
            if name == "index.json" or (yield "read", f"{folder}/{name}") != right:
                yield "write", (f"{folder}/{name}", right)

    def recall(self) -> Program:
        for name in active_receipts((yield "list", "")):
            bucket, tar, generation, _ = parse_name(name) or ("", "", 0, False)
            yield "create", (tombstone_name(bucket, tar, generation), b"suspect")

    def clean(self) -> Program:
        found, now = (yield "list", ""), self.shared.now
        receipts = [name for name in (yield "list", "commits") if name.endswith(".json")]
        named = set()
        for name in receipts:
            named.add(self.folder_of((yield "read", f"commits/{name}")))
        for folder in {name.rpartition("/")[0] for name in found if name.startswith(BUCKET)}:
            files = {name: entry for name, entry in found.items() if name.startswith(f"{folder}/")}
            if folder not in named and all(now - entry.modified > AGE for entry in files.values()):
                for name in files:
                    yield "remove", name


class Product(ProtocolMachine):
    """The product's own code, on an object store."""

    scratch = Scratch()

    def attempt(self, content: str, token: str) -> Program:
        source = self.scratch.top / content
        files = commit.record_files(source, {})
        receipt = make_receipt(token, f"{TAR}.{commit.content_hash(files)}", files)

        def work(store: Store) -> str:
            _, found = commit.current_generation(store, BUCKET, TAR)
            if found is None:
                commit.store_part(store, source, receipt.folder, files)
                found = commit.create_receipt(store, receipt)
            return found.token

        return InThread(work, self.moves).program()

    def recall(self) -> Program:
        def work(store: Store) -> None:
            recall(store, {receipt.name: receipt.token for receipt in load_receipts(store)}, "suspect")

        return InThread(work, self.moves).program()

    def clean(self) -> Program:
        return InThread(lambda store: clean.clean(store, AGE, quiet=-math.inf), self.moves).program()

    def right(self, folder: str) -> dict[str, bytes]:
        for content in "ab":
            if folder == f"{BUCKET}/{TAR}.{commit.content_hash(commit.record_files(self.scratch.top / content, {}))}":
                return super().right(f".{content}")
        raise AssertionError(f"{folder} is named by no content")


class ProductOnAFileSystem(Product):
    """The product's code on a file system, where a part is renamed into place."""

    moves = True


def make_receipt(token: str, part: str, files: dict[str, FileRecord]) -> Receipt:
    """Make a receipt without samples."""
    empty = synthetic_receipt(TAR, BUCKET, samples_of_files=())
    return empty.model_copy(update={"token": token, "part": part, "files": files})


@pytest.fixture(autouse=True)
def _a_root_is_there(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(clean.EncodingRecord, "load", lambda store: None)
    yield


MACHINES = [Model, Product, ProductOnAFileSystem]


@pytest.mark.parametrize("machine", MACHINES)
def test_the_protocol_holds(machine: type[ProtocolMachine]) -> None:
    run_state_machine_as_test(machine, settings=FEW)


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
def test_the_protocol_holds_in_many_orders(machine: type[ProtocolMachine]) -> None:
    run_state_machine_as_test(machine, settings=MANY)


class Overwrites(Model):
    """Faulty protocol: receipts are overwritten."""

    def attempt(self, content: str, token: str) -> Program:
        yield from self.place(content)
        data = json.dumps({"token": token, "part": f"{TAR}.{content}"}).encode()
        yield "write", (receipt_name(BUCKET, TAR), data)
        return token


class NeverReadsBack(Model):
    """Faulty protocol: an attempt assumes that an existing receipt is not its own, and continues if it was recalled."""

    def attempt(self, content: str, token: str) -> Program:
        yield from self.place(content)
        while True:
            generation, found = yield from self.current()
            if found is not None:
                return self.token_of(found)
            data = json.dumps({"token": token, "part": f"{TAR}.{content}"}).encode()
            if (yield "create", (receipt_name(BUCKET, TAR, generation), data)):
                return token


class ReceiptFirst(Model):
    """Faulty protocol: the receipt is created before the part."""

    def attempt(self, content: str, token: str) -> Program:
        data = json.dumps({"token": token, "part": f"{TAR}.{content}"}).encode()
        yield "create", (receipt_name(BUCKET, TAR), data)
        yield from self.place(content)
        return self.token_of((yield "read", receipt_name(BUCKET, TAR)))


class OneFolder(Model):
    """Faulty protocol: parts are named after their tar only."""

    def folder_of(self, data: bytes) -> str:
        return f"{BUCKET}/{TAR}"

    def right(self, folder: str) -> dict[str, bytes]:
        return super().right(".a") if folder == f"{BUCKET}/{TAR}" else super().right(folder)

    def place(self, content: str) -> Program:
        for name in FILES:
            yield "write", (f"{BUCKET}/{TAR}/{name}", f"{content}:{name}".encode())


class CleansTheYoung(Model):
    """Faulty protocol: cleaning removes parts without a receipt at any age."""

    def clean(self) -> Program:
        now, self.shared.now = self.shared.now, self.shared.now + 2 * AGE
        program = super().clean()
        call = next(program)
        reply = yield call
        call = program.send(reply)
        self.shared.now = now
        while True:
            reply = yield call
            try:
                call = program.send(reply)
            except StopIteration:
                return


class NeverRenews(Model):
    """Faulty protocol: an existing part is used without rewriting its index, however old it is."""

    def place(self, content: str) -> Program:
        for name in FILES:
            right = f"{content}:{name}".encode()
            if (yield "read", f"{BUCKET}/{TAR}.{content}/{name}") != right:
                yield "write", (f"{BUCKET}/{TAR}.{content}/{name}", right)


class CleansTheRecalled(Model):
    """Faulty protocol: cleaning removes recalled parts, although a run may read them."""

    def clean(self) -> Program:
        found, now = (yield "list", ""), self.shared.now
        named = {self.folder_of(self.shared.files[name][0]) for name in active_receipts(found)}
        for name, entry in found.items():
            if name.startswith(BUCKET) and name.rpartition("/")[0] not in named and now - entry.modified > AGE:
                yield "remove", name


def until_receipt(machine: ProtocolMachine) -> None:
    """Run an attempt with content a up to the call that creates its receipt."""
    machine.start_attempt("a")
    while machine.running[-1].call[0] != "create":
        machine.proceed(len(machine.running) - 1, 1)


def recalled_while_a_reply_is_lost(machine: ProtocolMachine) -> None:
    until_receipt(machine)
    machine.lose_a_reply(0)
    machine.start_recall()
    machine.finish(1)
    machine.finish(0)


def cleaned_while_a_receipt_is_on_its_way(machine: ProtocolMachine) -> None:
    until_receipt(machine)
    machine.crash(0, "late")
    machine.start_clean()
    machine.finish(0)
    machine.arrive(0)


def an_old_part_is_used_again(machine: ProtocolMachine) -> None:
    until_receipt(machine)
    machine.crash(0, "not sent")
    machine.time_passes(1.1)
    cleaned_while_a_receipt_is_on_its_way(machine)


SCENARIOS = [recalled_while_a_reply_is_lost, cleaned_while_a_receipt_is_on_its_way, an_old_part_is_used_again]


def play(machine: ProtocolMachine, scenario: Callable[[ProtocolMachine], None]) -> None:
    """Play a scenario, and check every invariant."""
    scenario(machine)
    machine.receipts_stay_as_they_are()
    machine.one_receipt_an_attempt_and_one_in_force()
    machine.what_a_receipt_names_is_whole()
    machine.nobody_writes_into_anothers_part()
    machine.teardown()


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("machine", MACHINES)
def test_a_scenario_holds(machine: type[ProtocolMachine], scenario: Callable[[ProtocolMachine], None]) -> None:
    play(machine(), scenario)


@pytest.mark.parametrize(
    ("mutant", "scenario"), list(zip([NeverReadsBack, CleansTheYoung, NeverRenews], SCENARIOS, strict=True))
)
def test_a_worse_protocol_falls_to_its_scenario(
    mutant: type[ProtocolMachine], scenario: Callable[[ProtocolMachine], None]
) -> None:
    with pytest.raises(AssertionError, match=r"one attempt committed two generations|is not whole"):
        play(mutant(), scenario)


@pytest.mark.parametrize("mutant", [Overwrites, ReceiptFirst, OneFolder, CleansTheRecalled])
def test_a_worse_protocol_is_found_out(mutant: type[ProtocolMachine]) -> None:
    with pytest.raises(AssertionError):
        run_state_machine_as_test(mutant, settings=settings(FEW, max_examples=2000, phases=[Phase.generate]))


def test_worse_code_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine finds the same fault in the product's code: it does not check whose receipt exists."""

    def create_receipt(store: Store, receipt: Receipt) -> Receipt:
        while True:
            generation, found = commit.current_generation(store, BUCKET, TAR)
            receipt = receipt.model_copy(update={"generation": generation})
            if found is not None:
                return found
            if store.create(receipt.name, receipt.sealed()):
                return receipt

    monkeypatch.setattr(commit, "create_receipt", create_receipt)
    with pytest.raises(AssertionError, match="one attempt committed two generations"):
        play(Product(), recalled_while_a_reply_is_lost)
