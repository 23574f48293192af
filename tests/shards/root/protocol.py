"""The commit protocol as a state machine, for its model and for the product's code."""

import json
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from shards.format.receipts import active_receipts, parse_name, receipt_name, tombstone_name
from tests.interleaving import InterleavingMachine, Program, Running

TAR, BUCKET = "00042", "64x64"
AGE = 100.0
"""Seconds after which `clean` may remove a part without a receipt. No attempt takes that long."""
FILES = ("data", "index.json")


class ProtocolMachine(InterleavingMachine):
    """At most three attempts at one part, of two contents, at a time; one recall, one cleaner; runs that are pinned."""

    moves = False

    def attempt(self, content: str, token: str) -> Program:
        """Run an attempt; return the token of the receipt that it considers active."""
        raise NotImplementedError

    def recall(self) -> Program:
        """Create a tombstone beside the active receipt."""
        raise NotImplementedError

    def clean(self) -> Program:
        """Remove old parts without a receipt."""
        raise NotImplementedError

    # accessors for the invariants, because each program has its own form of receipts
    def token_of(self, data: bytes) -> str:
        """Return the token of the attempt that wrote a receipt."""
        return str(json.loads(data)["token"])

    def folder_of(self, data: bytes) -> str:
        """Return the part that a receipt names."""
        return f"{BUCKET}/{json.loads(data)['part']}"

    def right(self, folder: str) -> dict[str, bytes]:
        """Return the content that a part of that name must have."""
        content = folder.rpartition(".")[2]
        return {name: f"{content}:{name}".encode() for name in FILES}

    def __init__(self) -> None:
        super().__init__()
        self.shared.files["encoding.json"] = b"", 0.0
        self.receipts: dict[str, bytes] = {}
        self.pinned: set[str] = set()
        self.number = 0

    @precondition(lambda self: self.count("attempt") < 3 and not self.count("clean"))
    @rule(content=st.sampled_from("ab"))
    def start_attempt(self, content: str) -> None:
        """Start an attempt at the tar."""
        self.number += 1
        self.begin("attempt", self.attempt(content, f"token-{self.number}"), f"token-{self.number}")

    @precondition(lambda self: not self.count("recall"))
    @rule()
    def start_recall(self) -> None:
        """Someone suspects what is in force."""
        self.begin("recall", self.recall())

    @precondition(lambda self: not self.count("attempt") and not self.count("clean"))
    @rule()
    def start_clean(self) -> None:
        """No job is running; what one sent before it died may still arrive."""
        self.begin("clean", self.clean())

    @rule(share=st.sampled_from([0.3, 1.1]))
    def time_passes(self, share: float) -> None:
        """Advance the time; no running program may last as long as `clean` waits."""
        self.shared.now += share * AGE
        self.late = [(began, call) for began, call in self.late if self.shared.now - began < AGE]
        for running in [r for r in self.running if self.shared.now - r.began >= AGE]:
            running.program.close()
            self.running.remove(running)

    @rule()
    def pin(self) -> None:
        """Start a training run that reads the active receipts from now on."""
        for name in active_receipts(self.shared.files):
            self.pinned.add(self.folder_of(self.shared.files[name][0]))

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

    @invariant()
    def receipts_stay_as_they_are(self) -> None:
        """Check that no receipt is changed or removed."""
        now = self._receipts()
        for name, data in self.receipts.items():
            assert now.get(name) == data, f"{name} was replaced"
        self.receipts = now

    @invariant()
    def one_receipt_an_attempt_and_one_in_force(self) -> None:
        """Check that generations start at 0 without gaps, all but the last are recalled, and no attempt wrote two."""
        assert len(active_receipts(self.shared.files)) <= 1
        tokens = [self.token_of(data) for data in self._receipts().values()]
        assert len(set(tokens)) == len(tokens), "one attempt committed two generations"
        for generation in range(1, len(tokens)):
            assert receipt_name(BUCKET, TAR, generation) in self.shared.files
            assert tombstone_name(BUCKET, TAR, generation - 1) in self.shared.files

    @invariant()
    def what_a_receipt_names_is_whole(self) -> None:
        """Check all parts that receipts name, including recalled ones, which pinned runs still read."""
        for folder in {self.folder_of(data) for data in self._receipts().values()} | self.pinned:
            for name, data in self.right(folder).items():
                assert self.shared.files.get(f"{folder}/{name}", (None,))[0] == data, f"{folder}/{name} is not whole"

    @invariant()
    def nobody_writes_into_anothers_part(self) -> None:
        """Check that every file has the content that its folder is named after."""
        for name, (data, _) in self.shared.files.items():
            folder, _, file = name.rpartition("/")
            if folder.startswith(f"{BUCKET}/"):
                assert self.right(folder)[file] == data

    def teardown(self) -> None:
        """Run an undisturbed attempt at the end, which must commit or find the committed part."""
        for running in self.running:
            running.program.close()
        self.running = []
        self.begin("attempt", self.attempt("a", "last"), "last")
        while self.running:
            self.reply(self.running[0], self.shared.do(self.running[0].call))
        assert len(active_receipts(self.shared.files)) == 1
        self.what_a_receipt_names_is_whole()
        self.one_receipt_an_attempt_and_one_in_force()


class Scratch:
    """Local folders with the two contents."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.top = Path(self.folder.name)
        for content in "ab":
            (self.top / content).mkdir()
            for name in FILES:
                (self.top / content / name).write_text(f"{content}:{name}")
