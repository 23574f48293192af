"""The product's commit protocol passes the state machine, and faulty versions of its code fail it."""

import json
import math
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from bench.kit.receipts import synthetic_receipt
from shards.base.store import Store
from shards.format.receipts import FileRecord, Receipt, active_receipts, parse_name, receipt_name, tombstone_name
from shards.root import commit
from shards.root.commit import recall
from shards.root.committed import load_receipts
from shards.tools import clean
from tests.interleaving import InterleavingMachine, InThread, Program, Running

pytestmark = pytest.mark.heavy

TAR, BUCKET = "00042", "64x64"
AGE = 100.0
"""Seconds after which `clean` may remove a part without a receipt. No attempt takes that long."""
FILES = ("data", "index.json")


@cache
def scratch() -> tempfile.TemporaryDirectory[str]:
    """Return a folder with two contents, `a` and `b`. It is made when a test needs it, because a process forked before
    that would delete it at its exit."""
    folder = tempfile.TemporaryDirectory()
    for content in "ab":
        (Path(folder.name) / content).mkdir()
        for name in FILES:
            (Path(folder.name) / content / name).write_text(f"{content}:{name}")
    return folder


def content_folder(content: str) -> Path:
    """Return the folder with that content."""
    return Path(scratch().name) / content


@cache
def records(content: str) -> dict[str, FileRecord]:
    """Return the records of the files with that content."""
    return commit.record_files(content_folder(content), {})


def part_name(content: str) -> str:
    """Return the name of a part with that content."""
    return f"{TAR}.{commit.content_hash(records(content))}"


class Product(InterleavingMachine):
    """The product's own code on an object store: at most three attempts at one part, of two contents, at a time; one
    recall, one cleaner; runs that are pinned."""

    moves = False

    def attempt(self, content: str, token: str) -> Program:
        """Run an attempt; return the token of the receipt that it considers active."""
        receipt = make_receipt(token, part_name(content), records(content))

        def work(store: Store) -> str:
            _, found = commit.current_generation(store, BUCKET, TAR)
            if found is None:
                commit.store_part(store, content_folder(content), receipt.folder, receipt.files)
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
        """Return the content that a part of that name must have."""
        assert folder in self.contents, f"{folder} is named by no content"
        return {name: f"{self.contents[folder]}:{name}".encode() for name in FILES}

    def token_of(self, data: bytes) -> str:
        """Return the token of the attempt that wrote a receipt."""
        return str(json.loads(data)["token"])

    def folder_of(self, data: bytes) -> str:
        """Return the part that a receipt names."""
        return f"{BUCKET}/{json.loads(data)['part']}"

    def __init__(self) -> None:
        super().__init__()
        self.shared.files["encoding.json"] = b"", 0.0
        self.receipts: dict[str, bytes] = {}
        self.pinned: set[str] = set()
        self.number = 0
        self.contents = {f"{BUCKET}/{part_name(content)}": content for content in "ba"}
        """Folder of a part → its content. If a fault gives both contents one folder, that of `a`."""

    def actions(self) -> list[Callable[[], None]]:
        actions = [self.pin]
        if not self.count("clean"):
            actions += [partial(self.start_attempt, content) for content in "ab" if self.count("attempt") < 3]
            # `clean` runs when no job is running, but what a job sent before it died may still arrive.
            actions += [self.start_clean] * (not self.count("attempt"))
        return actions + [self.start_recall] * (not self.count("recall"))

    def start_attempt(self, content: str) -> None:
        """Start an attempt at the tar."""
        self.number += 1
        self.begin("attempt", self.attempt(content, f"token-{self.number}"), f"token-{self.number}")

    def start_recall(self) -> None:
        """Someone suspects the active receipts."""
        self.begin("recall", self.recall())

    def start_clean(self) -> None:
        """Start `clean`."""
        self.begin("clean", self.clean())

    def pin(self) -> None:
        """Start a training run that reads the active receipts from now on."""
        for name in active_receipts(self.shared.files):
            self.pinned.add(self.folder_of(self.shared.files[name][0]))

    def time_passes(self, share: float) -> None:
        self.shared.now += share * AGE
        self.late = [(began, call) for began, call in self.late if self.shared.now - began < AGE]
        for running in [r for r in self.running if self.shared.now - r.began >= AGE]:
            running.program.close()
            self.running.remove(running)

    def may_be_late(self, running: Running) -> bool:
        return running.kind != "clean"

    def ended(self, running: Running, value: Any) -> None:
        if running.kind == "attempt":
            tokens = {self.token_of(data) for data in self._receipts().values()}
            assert value in tokens, "an attempt came back with a receipt that is not there"
            assert value == running.token or running.token not in tokens, "a winner took itself for a loser"

    def _receipts(self) -> dict[str, bytes]:
        names = (name for name in self.shared.files if (parsed := parse_name(name)) and not parsed[3])
        return {name: self.shared.files[name][0] for name in names}

    def receipts_stay_as_they_are(self) -> None:
        """Check that no receipt is changed or removed."""
        now = self._receipts()
        for name, data in self.receipts.items():
            assert now.get(name) == data, f"{name} was replaced"
        self.receipts = now

    def one_receipt_an_attempt_and_one_in_force(self) -> None:
        """Check that generations start at 0 without gaps, all but the last are recalled, and no attempt wrote two."""
        assert len(active_receipts(self.shared.files)) <= 1
        tokens = [self.token_of(data) for data in self._receipts().values()]
        assert len(set(tokens)) == len(tokens), "one attempt committed two generations"
        for generation in range(1, len(tokens)):
            assert receipt_name(BUCKET, TAR, generation) in self.shared.files
            assert tombstone_name(BUCKET, TAR, generation - 1) in self.shared.files

    def what_a_receipt_names_is_whole(self) -> None:
        """Check all parts that receipts name, including recalled ones, which pinned runs still read."""
        for folder in {self.folder_of(data) for data in self._receipts().values()} | self.pinned:
            for name, data in self.right(folder).items():
                assert self.shared.files.get(f"{folder}/{name}", (None,))[0] == data, f"{folder}/{name} is not whole"

    def nobody_writes_into_anothers_part(self) -> None:
        """Check that every file has the content that its folder is named after."""
        for name, (data, _) in self.shared.files.items():
            folder, _, file = name.rpartition("/")
            if folder.startswith(f"{BUCKET}/"):
                assert self.right(folder)[file] == data

    def check(self) -> None:
        self.receipts_stay_as_they_are()
        self.one_receipt_an_attempt_and_one_in_force()
        self.what_a_receipt_names_is_whole()
        self.nobody_writes_into_anothers_part()

    def run_last(self) -> None:
        self.start_attempt("a")
        if self.running:
            self.finish(0)
        assert len(active_receipts(self.shared.files)) == 1
        self.check()


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


MACHINES = [Product, ProductOnAFileSystem]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    "seeds", [range(50), pytest.param(range(50, 3000), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_the_protocol_holds(machine: type[Product], seeds: range) -> None:
    for seed in seeds:
        machine().play(partial(machine.walk, rng=Random(seed)))


def until_receipt(machine: Product) -> None:
    """Run an attempt with content a up to the call that creates its receipt."""
    machine.start_attempt("a")
    while True:
        kind, argument = machine.running[-1].call
        if kind in ("create", "write") and argument[0].startswith("commits/"):
            return
        machine.proceed(len(machine.running) - 1, 1)


def recalled_while_a_reply_is_lost(machine: Product) -> None:
    until_receipt(machine)
    machine.lose_a_reply(0)
    machine.start_recall()
    machine.finish(1)
    machine.finish(0)


def cleaned_while_a_receipt_is_on_its_way(machine: Product) -> None:
    until_receipt(machine)
    machine.crash(0, "late")
    machine.start_clean()
    machine.finish(0)
    machine.arrive(0)


def an_old_part_is_used_again(machine: Product) -> None:
    until_receipt(machine)
    machine.crash(0, "not sent")
    machine.time_passes(1.1)
    cleaned_while_a_receipt_is_on_its_way(machine)


def overtaken_by_other_content(machine: Product) -> None:
    until_receipt(machine)
    machine.start_attempt("b")
    machine.finish(1)
    machine.receipts_stay_as_they_are()
    machine.finish(0)


def killed_after_its_receipt(machine: Product) -> None:
    until_receipt(machine)
    machine.crash(0, "done")


def cleaned_after_a_recall(machine: Product) -> None:
    machine.start_attempt("a")
    machine.finish(0)
    machine.start_recall()
    machine.finish(0)
    machine.time_passes(1.1)
    machine.start_clean()
    machine.finish(0)


Patch = pytest.MonkeyPatch
STORE_PART, CREATE_RECEIPT, CLEAN = commit.store_part, commit.create_receipt, clean.clean


def never_reads_back(patch: Patch) -> None:
    """An attempt assumes that an existing receipt is not its own, and continues if it was recalled."""

    def create_receipt(store: Store, receipt: Receipt) -> Receipt:
        while True:
            generation, found = commit.current_generation(store, BUCKET, TAR)
            receipt = receipt.model_copy(update={"generation": generation})
            if found is not None:
                return found
            if store.create(receipt.name, receipt.sealed()):
                return receipt

    patch.setattr(commit, "create_receipt", create_receipt)


def cleans_the_young(patch: Patch) -> None:
    """Cleaning removes parts without a receipt at any age."""
    patch.setattr(clean, "clean", lambda store, older_than, quiet: CLEAN(store, -older_than, quiet))


def never_renews(patch: Patch) -> None:
    """An existing part is used without rewriting a file, however old it is."""
    patch.setattr(
        commit, "store_part", lambda store, _, folder, *rest: store.files(folder) or STORE_PART(store, _, folder, *rest)
    )


def overwrites(patch: Patch) -> None:
    """Receipts are overwritten."""

    def create_receipt(store: Store, receipt: Receipt) -> Receipt:
        store.write(receipt.name, receipt.sealed())
        return receipt

    patch.setattr(commit, "create_receipt", create_receipt)


def receipt_first(patch: Patch) -> None:
    """The receipt is created before the part."""

    def create_receipt(store: Store, receipt: Receipt) -> Receipt:
        found = CREATE_RECEIPT(store, receipt)
        STORE_PART(store, content_folder("a"), receipt.folder, receipt.files)
        return found

    patch.setattr(commit, "store_part", lambda *_: None)
    patch.setattr(commit, "create_receipt", create_receipt)


def one_folder(patch: Patch) -> None:
    """Parts are named after their tar only."""
    patch.setattr(commit, "content_hash", lambda files: "00000000")


def cleans_the_recalled(patch: Patch) -> None:
    """Cleaning removes recalled parts, although a run may read them."""
    patch.setattr(clean, "named_parts", lambda store: {receipt.folder for receipt in load_receipts(store)})


FAULTS: dict[Callable[[Product], None], Callable[[Patch], None]] = {
    recalled_while_a_reply_is_lost: never_reads_back,
    cleaned_while_a_receipt_is_on_its_way: cleans_the_young,
    an_old_part_is_used_again: never_renews,
    overtaken_by_other_content: one_folder,
    killed_after_its_receipt: receipt_first,
    cleaned_after_a_recall: cleans_the_recalled,
}
"""Scenario → fault that it finds."""


@pytest.mark.parametrize("scenario", FAULTS)
def test_a_scenario_holds_and_finds_its_fault(
    scenario: Callable[[Product], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for machine in MACHINES:
        machine().play(scenario)
    FAULTS[scenario](monkeypatch)
    with pytest.raises(AssertionError, match=r"is not whole|one attempt committed two generations"):
        Product().play(scenario)


@pytest.mark.parametrize("fault", [overwrites, receipt_first, one_folder, cleans_the_recalled, never_renews])
def test_random_orders_find_a_fault(fault: Callable[[Patch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        for seed in range(50):
            Product().play(partial(Product.walk, rng=Random(seed)))
