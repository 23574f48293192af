"""Calls in child processes: what kills a decoder, or never ends, costs its sample and not the tar.

A child is started afresh by `python -m precompute.pixels.isolation`, never forked: it holds neither the parent's CUDA
context nor its threads. Requests and replies are pickles over pipes of their own, which nothing else writes to
(multiprocessing's connections take three times as long over a picture's pixels). It ends when the parent does. It
imports torch, which scales pictures: some 500 MB, and 3 GB of the address space that `limits.decode_bytes` bounds.
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
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, BinaryIO, Generic, TypeVar

from precompute.input.reject import Reject
from precompute.pixels.decode import LimitsConfig
from shards.base.errors import WorkError

Result = TypeVar("Result")

CRASH = "decoder_crash"
CLOCK_PER_PROCESSOR_SECOND = 10
"""A call that waits instead of working is ended by the clock, this many times later than one that works."""
START_SECONDS = 300.0
"""A child may take to import what it needs, on a machine that is busy."""
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
            WorkError: there is no process to call.
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
    """One child process, and a pipe in each direction."""

    def __init__(self, limits: LimitsConfig):
        self.limits = limits
        one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        (its_requests, requests), (replies, its_replies) = os.pipe(), os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "precompute.pixels.isolation", str(its_requests), str(its_replies)],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what a decoder prints
            pass_fds=(its_requests, its_replies),
            env=os.environ | one_thread | {"PYTHONPATH": paths},
        )
        os.close(its_requests)
        os.close(its_replies)
        self.requests, self.replies = os.fdopen(requests, "wb"), os.fdopen(replies, "rb")
        self.ready = False

    def call(self, function: Callable[..., Result], args: tuple[Any, ...]) -> Result:
        """`function(*args)` over there.

        Raises:
            ChildDied: how.
            WorkError: it did not get as far as to take the call.
        """
        if not self.ready:
            try:
                self.ready = self._receive(START_SECONDS)
            except ChildDied as died:  # no fault of the picture's
                raise WorkError(f"a process to decode in did not start: {died}") from None
        try:
            pickle.dump((self.limits, function, args), self.requests, PICKLE_PROTOCOL)
            self.requests.flush()
        except BrokenPipeError:
            raise ChildDied(self._epitaph()) from None
        returned, value = self._receive(CLOCK_PER_PROCESSOR_SECOND * self.limits.decode_seconds)
        if isinstance(value, MemoryError):
            raise ChildDied(f"needs more than {self.limits.decode_bytes} bytes of memory")
        if not returned:
            raise value
        result: Result = value
        return result

    def _receive(self, seconds: float) -> Any:
        poll = select.poll()
        poll.register(self.replies)
        if not poll.poll(1000 * seconds):
            self.kill()
            raise ChildDied(f"did not end in {seconds:g} s" if self.ready else f"not in {seconds:g} s")
        try:
            return pickle.load(self.replies)
        except (EOFError, pickle.UnpicklingError):
            raise ChildDied(self._epitaph()) from None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.requests, self.replies):
            with contextlib.suppress(BrokenPipeError):  # a request that it did not read to the end
                pipe.close()

    def _epitaph(self) -> str:
        # it closed its pipes, so it is about to end, if it has not
        code = self.process.wait()
        self.kill()
        if code == -signal.SIGXCPU:
            return f"used more than {self.limits.decode_seconds} s of processor time"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def maybe_isolated(
    function: Callable[..., Result], limits: LimitsConfig, isolate: bool
) -> AbstractContextManager[Callable[..., Result]]:
    """`function` itself, or in child processes."""
    return Isolated(function, limits) if isolate else contextlib.nullcontext(function)


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """The child: answer requests until there are no more."""
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
        _limit(resource.RLIMIT_CPU, math.ceil(time.process_time()) + limits.decode_seconds)
        try:
            returned, value = True, function(*args)
        except Exception as error:  # handed over, and raised by the caller
            returned, value = False, error
        pickle.dump((returned, value), replies, PICKLE_PROTOCOL)
        replies.flush()


def _limit(what: int, value: int) -> None:
    _, hard = resource.getrlimit(what)
    resource.setrlimit(what, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


if __name__ == "__main__":
    serve(os.fdopen(int(sys.argv[1]), "rb"), os.fdopen(int(sys.argv[2]), "wb"))
