"""An S3 with network faults: moto behind a proxy. `python -m tests.faults.proxy` prints its address.

The proxy counts requests. At one of them it resets the connection, answers 503, executes the request and drops the
reply, or kills the sending process, before or after the request. Conditional PUTs of one key are serialised, because
moto checks first and then writes, so two could win. `GET /-/set?at=7&fault=lost&pid=0` waits for running requests,
restarts the count, and returns the previous count. `delay` delays each request by that many seconds, and `rate` limits
the bytes per second of both directions together.

`GET /-/suspend?at=2&of=state.json&pid=7` suspends process 7 when it sends its second PUT or POST (a deletion) whose
path or body contains `state.json`, and holds that request back; it responds once that has happened. `GET /-/resume`
resumes both.
"""

import asyncio
import math
import os
import signal
import urllib.request
from collections import defaultdict
from urllib.parse import parse_qs, urlencode, urlsplit

from moto.server import ThreadedMotoServer

FAULTS = ("reset", "503", "lost", "kill before", "kill after")
SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"


class Proxy:
    """Proxy server with one request per connection."""

    def __init__(self, host: str, port: int):
        self.upstream = host, port
        self.count, self.at, self.fault, self.pid = 0, 0, "", 0
        self.bytes, self.delay, self.rate, self.free_at = 0, 0.0, math.inf, 0.0
        self.keys: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.under_way: set[asyncio.Task[None]] = set()
        self.suspending, self.of, self.suspended, self.resumed = 0, b"", asyncio.Event(), asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle one connection."""
        try:
            await self._serve(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            writer.transport.abort()
        finally:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")[:-2]
        fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        path = lines[0].split()[1]
        if path.startswith("/-/set"):
            # a killed process's last requests still arrive
            await asyncio.gather(*self.under_way, return_exceptions=True)
            writer.write(self._set(path))
            return
        if path.startswith("/-/suspend"):
            given = {name: values[0] for name, values in parse_qs(urlsplit(path).query).items()}
            self.suspending, self.of, self.pid = int(given["at"]), given["of"].encode(), int(given["pid"])
            self.suspended.clear()
            self.resumed.clear()
            await self.suspended.wait()
            writer.write(DONE)
            return
        if path.startswith("/-/resume"):
            self.resumed.set()
            os.kill(self.pid, signal.SIGCONT)
            writer.write(DONE)
            return
        task = asyncio.current_task()
        assert task is not None
        self.under_way.add(task)
        task.add_done_callback(self.under_way.discard)
        if "expect" in fields:
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await read_body(reader, fields)
        await asyncio.sleep(self.delay)
        await self._carry(len(body))
        kept = [line for line in lines[1:] if line.partition(":")[0].lower() not in DROPPED]
        request = "\r\n".join([lines[0], *kept, f"Content-Length: {len(body)}", "Connection: close", "", ""])
        self.count += 1
        if self.suspending and lines[0].startswith(("PUT", "POST")) and self.of in path.encode() + body:
            self.suspending -= 1
            if not self.suspending:
                os.kill(self.pid, signal.SIGSTOP)
                self.suspended.set()
                await self.resumed.wait()
        fault = self.fault if self.count == self.at else ""
        if fault == "503":
            answer = f"HTTP/1.1 503 Slow Down\r\nContent-Length: {len(SLOW_DOWN)}\r\nConnection: close\r\n\r\n"
            writer.write(answer.encode() + SLOW_DOWN)
            return
        if fault == "kill before":
            os.kill(self.pid, signal.SIGKILL)
        if fault in ("reset", "kill before"):
            writer.transport.abort()
            return
        if "if-none-match" in fields:
            async with self.keys[path]:
                reply = await self._forward(request.encode("latin-1") + body)
        else:
            reply = await self._forward(request.encode("latin-1") + body)
        if fault == "kill after":
            os.kill(self.pid, signal.SIGKILL)
        if fault in ("lost", "kill after"):
            writer.transport.abort()
            return
        await self._carry(len(reply))
        writer.write(reply)
        await writer.drain()

    async def _carry(self, size: int) -> None:
        self.bytes += size
        now = asyncio.get_running_loop().time()
        self.free_at = max(now, self.free_at) + size / self.rate
        await asyncio.sleep(self.free_at - now)

    async def _forward(self, request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(*self.upstream)
        writer.write(request)
        reply = await reader.read()
        writer.close()
        return reply

    def _set(self, path: str) -> bytes:
        given = {name: values[0] for name, values in parse_qs(urlsplit(path).query, keep_blank_values=True).items()}
        so_far = f"{self.count} {self.bytes}".encode()
        self.count, self.at, self.fault, self.pid = 0, int(given["at"]), given["fault"], int(given["pid"])
        self.bytes, self.delay, self.rate = 0, float(given["delay"]), float(given["rate"])
        return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (len(so_far), so_far)


DONE = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
DROPPED = ("expect", "connection", "content-length", "transfer-encoding")


async def read_body(reader: asyncio.StreamReader, fields: dict[str, str]) -> bytes:
    """Read a request's body, by its content length or in chunks."""
    if fields.get("transfer-encoding", "").lower() != "chunked":
        return await reader.readexactly(int(fields.get("content-length", 0)))
    body = b""
    while size := int((await reader.readline()).split(b";")[0], 16):
        body += await reader.readexactly(size)
        await reader.readline()
    await reader.readline()
    return body


def set_fault(address: str, at: int = 0, fault: str = "", pid: int = 0) -> int:
    """Inject `fault` into request number `at` from now on; return the number of requests since the last call."""
    return _set(address, at=at, fault=fault, pid=pid)[0]


def suspend(address: str, pid: int, at: int, of: str) -> bool:
    """Suspend a process at its `at`-th request that writes or deletes `of`; return whether this happened within 60
    s."""
    try:
        query = urlencode({"at": at, "of": of, "pid": pid})
        with urllib.request.urlopen(f"{address}/-/suspend?{query}", timeout=60):
            return True
    except TimeoutError:
        return False


def resume(address: str) -> None:
    """Resume the suspended process and its request."""
    urllib.request.urlopen(f"{address}/-/resume", timeout=60).close()


def throttle(address: str, delay: float = 0.0, rate: float = math.inf) -> int:
    """Delay each request by `delay` seconds, and limit all to `rate` bytes/s; return the number of bytes so far."""
    return _set(address, delay=delay, rate=rate)[1]


def _set(address: str, **given: float | str) -> list[int]:
    query = urlencode({"at": 0, "fault": "", "pid": 0, "delay": 0.0, "rate": math.inf} | given)
    with urllib.request.urlopen(f"{address}/-/set?{query}", timeout=60) as reply:
        return [int(number) for number in reply.read().split()]


async def main() -> None:
    """Serve until killed."""
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    moto.start()
    proxy = Proxy(*moto.get_host_and_port())
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0, limit=1 << 24)
    print("http://{}:{}".format(*server.sockets[0].getsockname()), flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
