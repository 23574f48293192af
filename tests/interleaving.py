"""Interleaving programs call by call: for state machines that search for an order in which a protocol fails.

A program is a generator of store calls, or product code in a thread that hands over each of its store calls and waits
for the reply. The machine lets programs proceed one call at a time, kills them, delays their last requests, and loses
replies.
"""

import hashlib
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from random import Random
from typing import Any

from shards.base.store import Entry, Store

Call = tuple[str, Any]
Program = Generator[Call, Any, Any]

_thread = threading.local()


class Killed(BaseException):
    """Stands for SIGKILL."""


@dataclass
class Shared:
    """State of the store: name → bytes and the time of the write."""

    files: dict[str, tuple[bytes, float]] = field(default_factory=dict)
    now: float = 1e9

    def do(self, call: Call) -> Any:
        """Perform one atomic call, and return its reply."""
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
            case "sleep":
                self.now += argument
            case "file":  # the program's own file operation, which follows the reply
                return None
            case _:
                raise AssertionError(kind)
        return None


class InThread:
    """Runs a function of a store in a thread, as a program that hands over each store call."""

    def __init__(self, function: Callable[[Store], Any], moves: bool):
        self.calls: Queue[tuple[str, Any]] = Queue()
        self.replies: Queue[Any] = Queue()
        self.killed = False
        store = Handing(self._ask, moves)

        def work() -> None:
            _thread.ask = self._ask
            try:
                self.calls.put(("done", function(store)))
            except Killed:
                self.calls.put(("killed", None))
            except BaseException as error:
                self.calls.put(("error", error))

        self.thread = threading.Thread(target=work, daemon=True)

    def program(self) -> Program:
        """Start the thread, and yield its calls."""
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
            self.killed = True
            self.replies.put(None)
            raise
        finally:
            self.thread.join(10)

    def _ask(self, call: Call) -> Any:
        if not self.killed:
            self.calls.put(call)
            reply = self.replies.get()
        if self.killed:  # also in `finally` blocks, which SIGKILL would not run
            raise Killed
        return reply


def ask(call: Call) -> Any:
    """Hand over a call of the program that this thread runs; None: it runs no program."""
    return _thread.ask(call) if hasattr(_thread, "ask") else None


class Handing(Store):
    """A store that hands each call to `ask`. `moves`: whether it can rename folders, as a file system can."""

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
        raise AssertionError("no program reads a part")
        yield Path()

    def attempts(self) -> Path:
        raise AssertionError("no program asks for local attempts")


@dataclass
class Running:
    """A program that has started, and the call that it waits for."""

    kind: str
    program: Program
    call: Call
    began: float
    token: str = ""


class InterleavingMachine:
    """Runs programs on one store. Subclasses say which programs may begin, and which invariants hold."""

    def __init__(self) -> None:
        self.shared = Shared()
        self.running: list[Running] = []
        self.late: list[tuple[float, Call]] = []
        """Requests of killed programs that have not arrived yet, with the time when their program began."""

    def actions(self) -> list[Callable[[], None]]:
        """Return what may happen now, besides calls of running programs: mostly, that a program begins."""
        raise NotImplementedError

    def time_passes(self, share: float) -> None:
        """Advance the time by a share of the longest time for which the protocol waits."""
        raise NotImplementedError

    def check(self) -> None:
        """Check every invariant.

        Raises:
            AssertionError: one of them is violated.
        """
        raise NotImplementedError

    def run_last(self) -> None:
        """Run an undisturbed program after all others are dead; check that it succeeds."""
        raise NotImplementedError

    def play(self, scenario: Callable[[Any], None]) -> None:
        """Play a scenario, check every invariant, kill what still runs, and run the last program."""
        try:
            scenario(self)
            self.check()
            self.kill_all()
            self.run_last()
        finally:
            self.kill_all()

    def walk(self, rng: Random, turns: int = 60) -> None:
        """Let programs begin, take turns, be killed, lose replies and be late at random. Check after each turn."""
        for _ in range(turns):
            actions = self.actions()
            if actions and (not self.running or rng.random() < 0.2):
                rng.choice(actions)()
            elif self.running:
                self.disturb(rng, rng.randrange(len(self.running)))
            self.check()

    def disturb(self, rng: Random, which: int) -> None:
        """Let a program proceed, as in most turns, or let something happen to it."""
        match rng.choices(["proceed", "finish", "lose", "crash", "arrive", "wait"], [85, 3, 3, 3, 3, 3])[0]:
            case "proceed":
                self.proceed(which, rng.randint(1, 6))
            case "finish":
                self.finish(which)
            case "lose":
                self.lose_a_reply(which)
            case "crash":
                self.crash(which, rng.choice(["not sent", "done", "late"]))
            case "arrive" if self.late:
                self.arrive(rng.randrange(len(self.late)))
            case _:
                self.time_passes(rng.choice([0.3, 1.1]))

    def begin(self, kind: str, program: Program, token: str = "") -> None:
        """Start a program, up to its first call."""
        try:
            self.running.append(Running(kind, program, next(program), self.shared.now, token))
        except StopIteration:
            return

    def count(self, kind: str) -> int:
        """Count the running programs of one kind."""
        return sum(running.kind == kind for running in self.running)

    def ended(self, running: Running, value: Any) -> None:
        """Check what a program returned."""

    def reply(self, running: Running, reply: Any) -> None:
        """Let a program proceed to its next call."""
        try:
            running.call = running.program.send(reply)
        except StopIteration as end:
            self.running.remove(running)
            self.ended(running, end.value)

    def proceed(self, which: int, times: int) -> None:
        """Perform some calls of one program."""
        running = self.running[which]
        for _ in range(times):
            if running in self.running:
                self.reply(running, self.shared.do(running.call))

    def finish(self, which: int) -> None:
        """Let one program run to its end, undisturbed."""
        running = self.running[which]
        while running in self.running:
            self.reply(running, self.shared.do(running.call))

    def lose_a_reply(self, which: int) -> None:
        """Perform a call twice, as a client does that got no reply to its first request."""
        running = self.running[which]
        self.shared.do(running.call)
        self.reply(running, self.shared.do(running.call))

    def crash(self, which: int, sent: str) -> None:
        """Kill a program whose pending call was not sent, was performed ("done"), or arrives later ("late")."""
        running = self.running[which]
        if sent == "done":
            self.perform_last(running)
        if sent == "late" and self.may_be_late(running):
            self.late.append((running.began, running.call))
        if running in self.running:
            self.running.remove(running)
        running.program.close()

    def perform_last(self, running: Running) -> None:
        """Perform the pending call of a program that is about to be killed."""
        self.shared.do(running.call)

    def may_be_late(self, running: Running) -> bool:
        """Return whether the last request of a killed program may arrive after its death."""
        return True

    def arrive(self, which: int) -> None:
        """Perform the last request of a killed program."""
        _, call = self.late.pop(which)
        self.shared.do(call)

    def kill_all(self) -> None:
        """Kill every running program before its pending call."""
        for running in self.running:
            running.program.close()
        self.running = []
