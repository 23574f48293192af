"""Calls in child processes: what kills a decoder, or never ends, costs its sample and not the shard.

A child is started afresh by `python -m precompute.isolation`, never forked: it holds neither the parent's CUDA context
nor its threads. Requests and replies are pickles over its pipes. It ends when the parent does. It imports torch, which
scales pictures: some 500 MB, and 3 GB of the address space that `limits.decode_bytes` bounds.
"""

import contextlib
import math
import os
import pickle
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from precompute.pixels import LimitsConfig, Reject

Result = TypeVar("Result")

CRASH = "decoder_crash"
CLOCK_PER_PROCESSOR_SECOND = 10
"""A call that waits instead of working is ended by the clock, this many times later than one that works."""
START_SECONDS = 300.0
"""A child may take to import what it needs, on a machine that is busy."""
END_SECONDS = 10.0
"""A child that closed its pipes ends at once; one that is still there after this time wrote what is no reply."""
TRIES = 2
"""What kills a call twice is in its arguments; once, it may have been the machine."""
PICKLE_PROTOCOL = 5


class ChildDied(Exception):
    """A child process ended, or had to be ended, in the middle of a call."""


class Isolated(Generic[Result]):
    """`function`, which must be importable by name, in child processes: one for each thread that calls it.

    A context manager; on leaving, its children end.
    """

    def __init__(self, function: Callable[..., Result], limits: LimitsConfig):
        self.function = function
        self.limits = limits
        self.by_thread = threading.local()
        self.children: list[Child] = []

    def __enter__(self) -> "Isolated[Result]":
        return self

    def __exit__(self, *_: object) -> None:
        for child in self.children:
            child.kill()

    def __call__(self, *args: Any) -> Result:
        """`function(*args)`; whatever it raises is raised here.

        Raises:
            Reject: `decoder_crash`; the call killed its process, took too long, or took too much memory, twice.
        """
        for _ in range(TRIES):
            try:
                return self._child().call(self.function, args)
            except ChildDied as died:
                how = str(died)
        raise Reject(CRASH, how)

    def _child(self) -> "Child":
        child: Child | None = getattr(self.by_thread, "child", None)
        if child is None or child.process.poll() is not None:
            child = self.by_thread.child = Child(self.limits)
            self.children.append(child)
        return child


class Child:
    """One child process, and its two pipes."""

    def __init__(self, limits: LimitsConfig):
        self.limits = limits
        one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "precompute.isolation"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | one_thread | {"PYTHONPATH": paths},
        )
        self.ready = False

    def call(self, function: Callable[..., Result], args: tuple[Any, ...]) -> Result:
        """`function(*args)` over there.

        Raises:
            ChildDied: how.
        """
        assert self.process.stdin
        try:
            if not self.ready:
                self.ready = self._receive(START_SECONDS, "start")
            pickle.dump((self.limits, function, args), self.process.stdin, PICKLE_PROTOCOL)
            self.process.stdin.flush()
            returned, value = self._receive(CLOCK_PER_PROCESSOR_SECOND * self.limits.decode_seconds, "end")
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            raise ChildDied(self._epitaph()) from None
        if isinstance(value, MemoryError):
            raise ChildDied(f"needs more than {self.limits.decode_bytes} bytes of memory")
        if not returned:
            raise value
        result: Result = value
        return result

    def _receive(self, seconds: float, what: str) -> Any:
        """What the child sends next."""
        assert self.process.stdout
        poll = select.poll()
        poll.register(self.process.stdout)
        if not poll.poll(1000 * seconds):
            self.kill()
            raise ChildDied(f"did not {what} in {seconds:g} s")
        return pickle.load(self.process.stdout)

    def kill(self) -> None:
        """End the process, whatever it is doing."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):  # a request that it did not read to the end
                pipe.close()  # type: ignore[union-attr]

    def _epitaph(self) -> str:
        try:
            code = self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return "sent what is no reply"
        finally:
            self.kill()
        if code == -signal.SIGXCPU:
            return f"used more than {self.limits.decode_seconds} s of processor time"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


@contextlib.contextmanager
def maybe_isolated(
    function: Callable[..., Result], limits: LimitsConfig, isolate: bool
) -> Iterator[Callable[..., Result]]:
    """`function` itself, or in child processes."""
    if not isolate:
        yield function
        return
    with Isolated(function, limits) as isolated:
        yield isolated


def serve() -> None:
    """The child: answer requests until there are no more."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # a decoder that prints does not print into the replies
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # where memory runs out, this process goes before the one with the encoders
    pickle.dump(True, replies, PICKLE_PROTOCOL)
    replies.flush()
    while True:
        try:
            limits, function, args = pickle.load(requests)
        except EOFError:
            return
        _limit(resource.RLIMIT_AS, limits.decode_bytes)
        _limit(resource.RLIMIT_CPU, math.ceil(_processor_seconds()) + limits.decode_seconds)
        reply: tuple[bool, Any]
        try:
            reply = True, function(*args)
        except Exception as error:  # handed over, and raised by the caller
            reply = False, error
        pickle.dump(reply, replies, PICKLE_PROTOCOL)
        replies.flush()


def _limit(what: int, value: int) -> None:
    _, hard = resource.getrlimit(what)
    resource.setrlimit(what, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    serve()
