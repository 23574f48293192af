"""The commit protocol as a state machine: programs that take one store call at a time, and a store that loses replies.

A program is the model's (a generator of calls, a few lines each) or the product's own code in a thread, whose store
hands each call over and waits. Both meet the same faults, one call at a time, and the same invariants.
"""

import hashlib
import json
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shards.base.store import Entry, Store
from shards.format.receipts import active_receipts, parse_name, receipt_name, tombstone_name

TAR, BUCKET = "00042", "64x64"
AGE = 100.0
"""Seconds after which `clean` may remove; no attempt takes as long, with all that it sent before it died."""
FILES = ("data", "index.json")
Call = tuple[str, Any]
Program = Generator[Call, Any, Any]


class Killed(BaseException):
    """Stands for SIGKILL."""


@dataclass
class Shared:
    """The store's state: name → bytes and the time of the write."""

    files: dict[str, tuple[bytes, float]] = field(default_factory=lambda: {"encoding.json": (b"", 0.0)})
    now: float = 1e9

    def do(self, call: Call) -> Any:
        """One call, which is atomic; its reply."""
        kind, argument = call
        match kind:
            case "read":
                return self.files[argument][0] if argument in self.files else None
            case "list":
                top = f"{argument}/" if argument else ""
                return {
                    name.removeprefix(top): Entry(len(data), hashlib.sha256(data).hexdigest(), time)
                    for name, (data, time) in self.files.items()
                    if name.startswith(top)
                }
            case "create":
                name, data = argument
                if name in self.files:
                    return False
                self.files[name] = data, self.now
                return True
            case "write":
                name, data = argument
                self.files[name] = data, self.now
            case "move":
                folder, contents = argument
                if any(name.startswith(f"{folder}/") for name in self.files):
                    return False
                self.files |= {f"{folder}/{name}": (data, self.now) for name, data in contents.items()}
                return True
            case "remove":
                self.files.pop(argument, None)
            case _:
                raise AssertionError(kind)
        return None


class InThread:
    """A function of a store as a program: its store calls are handed over one by one."""

    def __init__(self, function: Callable[[Store], Any], moves: bool):
        self.calls: Queue[tuple[str, Any]] = Queue()
        self.replies: Queue[Any] = Queue()
        store = Handing(self._ask, moves)

        def work() -> None:
            try:
                self.calls.put(("done", function(store)))
            except Killed:
                self.calls.put(("killed", None))
            except BaseException as error:
                self.calls.put(("error", error))

        self.thread = threading.Thread(target=work, daemon=True)

    def program(self) -> Program:
        """As a generator of calls."""
        self.thread.start()
        try:
            while True:
                kind, value = self.calls.get()
                if kind == "done":
                    return value
                if kind == "error":
                    raise value
                self.replies.put((yield kind, value))
        except GeneratorExit:
            self.replies.put(Killed())
            raise
        finally:
            self.thread.join(10)

    def _ask(self, call: Call) -> Any:
        self.calls.put(call)
        reply = self.replies.get()
        if isinstance(reply, Killed):
            raise reply
        return reply


class Handing(Store):
    """A store each of whose calls is another's decision. `moves`: as a folder; else as an object store."""

    def __init__(self, ask: Callable[[Call], Any], moves: bool):
        self.ask, self.moves = ask, moves

    def where(self, name: str = "") -> str:
        return name

    def read(self, name: str) -> bytes:
        data = self.ask(("read", name))
        if data is None:
            raise FileNotFoundError(name)
        return bytes(data)

    def read_range(self, name: str, start: int, end: int) -> bytes:
        return self.read(name)[start:end]

    def get(self, name: str, target: Path) -> None:
        target.write_bytes(self.read(name))

    def size(self, name: str) -> int | None:
        data = self.ask(("read", name))
        return None if data is None else len(data)

    def sha256(self, name: str) -> str:
        return hashlib.sha256(self.read(name)).hexdigest()

    def listing(self, folder: str = "") -> dict[str, Entry]:
        return dict(self.ask(("list", folder)))

    def entries(self) -> list[str]:
        return sorted({name.partition("/")[0] for name in self.listing()})

    def write(self, name: str, data: bytes) -> None:
        self.ask(("write", (name, data)))

    def create(self, name: str, data: bytes) -> bool:
        return bool(self.ask(("create", (name, data))))

    def move(self, source: Path, folder: str) -> bool:
        contents = {path.name: path.read_bytes() for path in source.iterdir()}
        return self.moves and bool(self.ask(("move", (folder, contents))))

    def put(self, files: Mapping[str, Path]) -> None:
        for name, path in files.items():
            self.write(name, path.read_bytes())

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            self.ask(("remove", name))

    @contextmanager
    def local(self, folder: str, names: Sequence[str] | None = None) -> Iterator[Path]:
        raise AssertionError("nothing here reads a part")
        yield Path()

    def attempts(self) -> Path:
        raise AssertionError("attempts are local")


@dataclass
class Running:
    """A program under way."""

    kind: str
    program: Program
    call: Call
    began: float
    token: str = ""


class ProtocolMachine(RuleBasedStateMachine):
    """At most three attempts at one part, of two contents, at a time; one recall, one cleaner; runs that are pinned."""

    moves = False

    def attempt(self, content: str, token: str) -> Program:
        """An attempt; returns the token of the receipt that it takes to be in force."""
        raise NotImplementedError

    def recall(self) -> Program:
        """Puts a tombstone beside what is in force."""
        raise NotImplementedError

    def clean(self) -> Program:
        """Removes old parts without a receipt."""
        raise NotImplementedError

    # what the invariants need of a receipt, whose form is the program's
    def token_of(self, data: bytes) -> str:
        """The attempt that wrote it."""
        return str(json.loads(data)["token"])

    def folder_of(self, data: bytes) -> str:
        """The part that it names."""
        return f"{BUCKET}/{json.loads(data)['part']}"

    def right(self, folder: str) -> dict[str, bytes]:
        """What the part of that name holds."""
        content = folder.rpartition(".")[2]
        return {name: f"{content}:{name}".encode() for name in FILES}

    def __init__(self) -> None:
        super().__init__()
        self.shared = Shared()
        self.running: list[Running] = []
        self.late: list[tuple[float, Call]] = []
        self.receipts: dict[str, bytes] = {}
        self.pinned: set[str] = set()
        self.number = 0

    def _begin(self, kind: str, program: Program, token: str = "") -> None:
        try:
            self.running.append(Running(kind, program, next(program), self.shared.now, token))
        except StopIteration:
            return

    def _live(self, kind: str) -> int:
        return sum(running.kind == kind for running in self.running)

    @precondition(lambda self: self._live("attempt") < 3 and not self._live("clean"))
    @rule(content=st.sampled_from("ab"))
    def start_attempt(self, content: str) -> None:
        """A worker takes the tar."""
        self.number += 1
        self._begin("attempt", self.attempt(content, f"token-{self.number}"), f"token-{self.number}")

    @precondition(lambda self: not self._live("recall"))
    @rule()
    def start_recall(self) -> None:
        """Someone suspects what is in force."""
        self._begin("recall", self.recall())

    @precondition(lambda self: not self._live("attempt") and not self._live("clean"))
    @rule()
    def start_clean(self) -> None:
        """No job is running; what one sent before it died may still arrive."""
        self._begin("clean", self.clean())

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 9), times=st.integers(1, 6))
    def go_on(self, which: int, times: int) -> None:
        """Some calls of one program, each with its reply."""
        running = self.running[which % len(self.running)]
        for _ in range(times):
            if running in self.running:
                self._reply(running, self.shared.do(running.call))

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 9))
    def finish(self, which: int) -> None:
        """All that is left of one program, undisturbed."""
        running = self.running[which % len(self.running)]
        while running in self.running:
            self._reply(running, self.shared.do(running.call))

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 9))
    def lose_a_reply(self, which: int) -> None:
        """The call is done, its reply lost; the client makes it again."""
        running = self.running[which % len(self.running)]
        self.shared.do(running.call)
        self._reply(running, self.shared.do(running.call))

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 9), sent=st.sampled_from(["not sent", "done", "late"]))
    def crash(self, which: int, sent: str) -> None:
        """A program is killed at a call that it has not sent, that is done, or that arrives later."""
        running = self.running.pop(which % len(self.running))
        if sent == "done":
            self.shared.do(running.call)
        if sent == "late" and running.kind != "clean":
            self.late.append((running.began, running.call))
        running.program.close()

    @precondition(lambda self: self.late)
    @rule(which=st.integers(0, 9))
    def arrive(self, which: int) -> None:
        """A dead program's last request."""
        _, call = self.late.pop(which % len(self.late))
        self.shared.do(call)

    @rule(share=st.sampled_from([0.3, 1.1]))
    def time_passes(self, share: float) -> None:
        """Nothing that was begun lasts as long as `clean` waits."""
        self.shared.now += share * AGE
        self.late = [(began, call) for began, call in self.late if self.shared.now - began < AGE]
        for running in [r for r in self.running if self.shared.now - r.began >= AGE]:
            running.program.close()
            self.running.remove(running)

    @rule()
    def pin(self) -> None:
        """A training run begins with what is in force, and reads it for ever."""
        for name in active_receipts(self.shared.files):
            self.pinned.add(self.folder_of(self.shared.files[name][0]))

    def _reply(self, running: Running, reply: Any) -> None:
        try:
            running.call = running.program.send(reply)
        except StopIteration as end:
            self.running.remove(running)
            if running.kind == "attempt":
                tokens = {self.token_of(data) for data in self._receipts().values()}
                assert end.value in tokens, "an attempt came back with a receipt that is not there"
                assert end.value == running.token or running.token not in tokens, "a winner took itself for a loser"

    def _receipts(self) -> dict[str, bytes]:
        names = (name for name in self.shared.files if (parsed := parse_name(name)) and not parsed[3])
        return {name: self.shared.files[name][0] for name in names}

    @invariant()
    def receipts_stay_as_they_are(self) -> None:
        """Once there, a receipt is there for good."""
        now = self._receipts()
        for name, data in self.receipts.items():
            assert now.get(name) == data, f"{name} was replaced"
        self.receipts = now

    @invariant()
    def one_receipt_an_attempt_and_one_in_force(self) -> None:
        """Generations begin at 0 without a gap, all but the last are recalled, and no attempt wrote two."""
        assert len(active_receipts(self.shared.files)) <= 1
        tokens = [self.token_of(data) for data in self._receipts().values()]
        assert len(set(tokens)) == len(tokens), "one attempt committed two generations"
        for generation in range(1, len(tokens)):
            assert receipt_name(BUCKET, TAR, generation) in self.shared.files
            assert tombstone_name(BUCKET, TAR, generation - 1) in self.shared.files

    @invariant()
    def what_a_receipt_names_is_whole(self) -> None:
        """Recalled ones too: runs that were pinned before read on."""
        for folder in {self.folder_of(data) for data in self._receipts().values()} | self.pinned:
            for name, data in self.right(folder).items():
                assert self.shared.files.get(f"{folder}/{name}", (None,))[0] == data, f"{folder}/{name} is not whole"

    @invariant()
    def nobody_writes_into_anothers_part(self) -> None:
        """Every file has the content that its folder is named by."""
        for name, (data, _) in self.shared.files.items():
            folder, _, file = name.rpartition("/")
            if folder.startswith(f"{BUCKET}/"):
                assert self.right(folder)[file] == data

    def teardown(self) -> None:
        """An undisturbed attempt at the end commits, or finds what was committed."""
        for running in self.running:
            running.program.close()
        self.running = []
        self._begin("attempt", self.attempt("a", "last"), "last")
        while self.running:
            self._reply(self.running[0], self.shared.do(self.running[0].call))
        assert len(active_receipts(self.shared.files)) == 1
        self.what_a_receipt_names_is_whole()
        self.one_receipt_an_attempt_and_one_in_force()


class Scratch:
    """Local folders of the two contents."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.top = Path(self.folder.name)
        for content in "ab":
            (self.top / content).mkdir()
            for name in FILES:
                (self.top / content / name).write_text(f"{content}:{name}")
