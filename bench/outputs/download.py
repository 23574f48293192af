"""What downloading a picture costs: `python -m bench.outputs.download`, for docs/evidence/data.md.

The command itself downloads pictures from a server of this machine, which has a process of its own and answers each
request with the same bytes: no network, no resolver, and no site that is slow.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bench.kit.common import machine, table

SERVER = """
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

BODY = bytes.fromhex("ffd8ffe0") + bytes(int(sys.argv[1]))

class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "image/jpeg")
        self.send_header("Content-Length", str(len(BODY)))
        self.end_headers()
        self.wfile.write(BODY)

    def log_message(self, *_):
        pass

server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
print(server.server_port, flush=True)
server.serve_forever()
"""


@contextmanager
def served(num_bytes: int) -> Iterator[str]:
    """The server's address."""
    server = subprocess.Popen([sys.executable, "-c", SERVER, str(num_bytes)], stdout=subprocess.PIPE, text=True)
    assert server.stdout
    yield f"http://127.0.0.1:{server.stdout.readline().strip()}"
    server.kill()
    server.communicate()


def write_rows(path: Path, address: str, count: int) -> None:
    """A parquet file as the selection writes it."""
    columns = {
        "key": [f"k{number}" for number in range(count)],
        "URL": [f"{address}/{number}.jpg" for number in range(count)],
        "TEXT": ["a picture of a thing on a table"] * count,
        "WIDTH": np.full(count, 640, np.int32),
        "HEIGHT": np.full(count, 480, np.int32),
    }
    pq.write_table(pa.table(columns), path)


def download(folder: Path, address: str, options: argparse.Namespace) -> tuple[float, float]:
    """Seconds, and processor seconds, of the whole command."""
    write_rows(folder / "rows.parquet", address, options.pictures)
    words = ["--input", str(folder / "rows.parquet"), "--output", str(folder / "tars"), "--rows_per_shard", "1000"]
    words += ["--processes", "1", "--threads", str(options.threads), "--requests.allow_private_hosts", "true"]
    command = [sys.executable, "-m", "precompute.download", "--config", "configs/download.yaml", *words]
    before, start = os.times(), time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    seconds, after = time.perf_counter() - start, os.times()
    return seconds, after.children_user + after.children_system - before.children_user - before.children_system


def main() -> None:
    """Download anew in each round; Markdown."""
    parser = argparse.ArgumentParser(prog="bench.outputs.download", description=__doc__)
    parser.add_argument("--pictures", type=int, default=6000)
    parser.add_argument("--bytes", type=int, default=100_000, help="of a picture")
    parser.add_argument("--threads", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rows = []
    with served(options.bytes) as address:
        for number in range(options.rounds):
            with tempfile.TemporaryDirectory() as folder:
                seconds, processor = download(Path(folder), address, options)
            rows.append([number, f"{options.pictures / seconds:,.0f}", f"{1000 * processor / options.pictures:.2f}"])
    print(machine() + "\n\n" + table(["round", "pictures/s", "ms of processor time a picture"], rows))


if __name__ == "__main__":
    main()
