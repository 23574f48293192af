"""Function calls in child processes, so that an image that crashes or hangs its decoder costs only one sample.

A child is a new interpreter (`python -m precompute.pixels.isolation`), never a fork, so it has neither the parent's
CUDA context nor its threads. Requests and replies are pickles on two dedicated pipes, which nothing else writes to. A
child exits when its parent does. It imports torch for resampling, which takes about 500 MB of memory, and 3 GB of the
address space that `limits.decode_bytes` allows.

`multiprocessing` would be simpler, but is unsuitable: its spawned children import the parent's main module again, which
on a Ray worker means Ray itself; they inherit the parent's environment, so BLAS would start a thread per core; and its
connections take three times as long to transfer an image's pixels.
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
from typing import Any, BinaryIO, Generic, TypeVar

from precompute.input.reject import Reject
from precompute.pixels.decode import LimitsConfig
from shards.base.errors import WorkError

Result = TypeVar("Result")

CRASH = "decoder_crash"
CLOCK_PER_PROCESSOR_SECOND = 10
"""Wall-clock limit for a call, as a multiple of its CPU time limit. It ends calls that sleep instead of computing."""
START_SECONDS = 300.0
"""Maximum time for a child to start and import its modules on a busy machine."""
TRIES = 2
"""Number of times that a call is tried. A call that kills its process once may have hit a machine fault; if it does so
twice, its arguments are to blame."""
PICKLE_PROTOCOL = 5


class ChildDied(Exception):
    """Raised when a child process dies or is killed during a call. The message is a phrase that gives the cause, such
    as `exit code 1`."""


class Isolated(Generic[Result]):
    """Callable that runs `function` in child processes, one for each calling thread.

    It is also a context manager that kills the child processes on exit. `function` must be importable by name.
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
        """Return `function(*args)`. Exceptions of `function` propagate.

        Raises:
            Reject: `decoder_crash`, if both tries killed their process or exceeded the time or memory limit.
            WorkError: A child process could not be started.
        """
        for _ in range(TRIES):
            try:
                return self._child().call(self.function, args)
            except ChildDied as died:
                reason = str(died)
        raise Reject(CRASH, reason)

    def _child(self) -> "Child":
        child: Child | None = getattr(self.by_thread, "child", None)
        if child is None or child.process.poll() is not None:
            child = self.by_thread.child = Child(self.limits)
            self.children.append(child)
        return child


class Child:
    """A child process with a pipe in each direction."""

    def __init__(self, limits: LimitsConfig):
        self.limits = limits
        one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        (its_requests, requests), (replies, its_replies) = os.pipe(), os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "precompute.pixels.isolation", str(its_requests), str(its_replies)],
            stdin=subprocess.DEVNULL,
            stdout=2,  # stderr, because decoders may print, and stdout may be the output of a command
            pass_fds=(its_requests, its_replies),
            env=os.environ | one_thread | {"PYTHONPATH": paths},
        )
        os.close(its_requests)
        os.close(its_replies)
        self.requests, self.replies = os.fdopen(requests, "wb"), os.fdopen(replies, "rb")
        self.ready = False

    def call(self, function: Callable[..., Result], args: tuple[Any, ...]) -> Result:
        """Return `function(*args)`, computed in the child. Exceptions of `function` propagate; raises ChildDied if the
        child died or exceeded a limit, and WorkError if it did not start."""
        if not self.ready:
            try:
                self.ready = self._receive(START_SECONDS)
            except ChildDied as died:  # a failed start is not the image's fault
                raise WorkError(
                    f"a decoder process failed to start: {died}. Check this machine's memory, and check the log "
                    f"above for an import error"
                ) from None
        try:
            pickle.dump((self.limits, function, args), self.requests, PICKLE_PROTOCOL)
            self.requests.flush()
        except BrokenPipeError:
            raise ChildDied(self._cause_of_death()) from None
        returned, value = self._receive(CLOCK_PER_PROCESSOR_SECOND * self.limits.decode_seconds)
        if isinstance(value, MemoryError):
            raise ChildDied(f"needed more than {self.limits.decode_bytes} bytes of memory")
        if not returned:
            raise value
        result: Result = value
        return result

    def _receive(self, seconds: float) -> Any:
        """Read one pickle from the child, and kill the child if none arrives within `seconds`."""
        poll = select.poll()
        poll.register(self.replies)
        if not poll.poll(1000 * seconds):
            self.kill()
            raise ChildDied(f"did not finish within {seconds:g} s" if self.ready else f"not ready after {seconds:g} s")
        try:
            return pickle.load(self.replies)
        except (EOFError, pickle.UnpicklingError):
            raise ChildDied(self._cause_of_death()) from None

    def kill(self) -> None:
        """Kill the child, wait for it, and close the pipes."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.requests, self.replies):
            with contextlib.suppress(BrokenPipeError):  # the child had not read the whole request
                pipe.close()

    def _cause_of_death(self) -> str:
        code = self.process.wait()  # returns quickly, because the child has closed its pipes
        self.kill()
        if code == -signal.SIGXCPU:
            return f"used more than {self.limits.decode_seconds} s of CPU time"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Answer requests until the parent closes its pipe. This is the main loop of a child."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # so that the OOM killer chooses this process, not the one with the encoders
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
        except Exception as error:  # sent to the parent, which raises it
            returned, value = False, error
        pickle.dump((returned, value), replies, PICKLE_PROTOCOL)
        replies.flush()


def _limit(kind: int, value: int) -> None:
    """Set a soft resource limit, capped by the hard limit."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


if __name__ == "__main__":
    serve(os.fdopen(int(sys.argv[1]), "rb"), os.fdopen(int(sys.argv[2]), "wb"))
