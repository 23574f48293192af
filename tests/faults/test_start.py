"""The start of a machine's ranks on a root with many files, on a store that takes 50 ms per call.

All file names refer to the same content, so the store holds it only once. The output is for
docs/evidence/reliability.md.
"""

import asyncio
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import psutil
import pyarrow as pa
import pytest
from moto.server import ThreadedMotoServer

from shards.open import open_store
from shards.root.committed import load_receipts
from shards.root.manifest import BucketIndex, BucketSize, Manifest
from shards.root.segments import MDS_FILE, SCHEMA, content_id, make_rows, save_segment, sizes
from tests import ranks
from tests.faults.proxy import Proxy
from tests.runs import train_fields, write_config
from train.run.reporting.json_lines import read_json_lines

FILES_OF_A_PART, DELAY = 100, 0.05
BUCKET = "64x64"


class OneFile(Proxy):
    """Serves the same content for every MDS file, and counts requests."""

    def __init__(self, host: str, port: int, real: str):
        super().__init__(host, port)
        self.real, self.delay, self.asked = real, DELAY, Counter[str]()

    async def _forward(self, request: bytes) -> bytes:
        head = request.split(b"\r\n", 1)[0].decode("latin-1")
        kind = "files" if ".mds" in head else "segments" if "index/segments/" in head else "others"
        self.asked[kind] += 1
        line = re.sub(rf"{BUCKET}/[^/]+/shard\.\d+\.mds", self.real, head) if self.real else head
        return await super()._forward(line.encode("latin-1") + request[len(head) :])


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OneFile]:
    """Run moto behind the proxy in a thread."""
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    moto.start()
    proxy, loop, ports = OneFile(*moto.get_host_and_port(), real=""), asyncio.new_event_loop(), list[int]()

    async def listen() -> None:
        server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0, limit=1 << 24)
        ports.append(server.sockets[0].getsockname()[1])

    loop.run_until_complete(listen())
    threading.Thread(target=loop.run_forever, daemon=True).start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{ports[0]}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "us-east-1")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    fsspec.filesystem("s3").makedirs("million")
    yield proxy
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    loop.call_soon_threadsafe(loop.stop)
    moto.stop()


def put_root(latents: Path, address: str, parts: int) -> str:
    """Make a root with many names for one file of `latents`; return that file's path."""
    here, there = open_store(str(latents)), open_store(address)
    there.put({path.name: path for path in latents.iterdir() if path.is_file()})
    receipt = next(receipt for receipt in load_receipts(here) if receipt.bucket == BUCKET)
    real = f"{BUCKET}/{receipt.part}/{receipt.mds[0].basename}"
    there.put({real: latents / real})
    row = make_rows([(receipt, "")])
    one, count = receipt.mds[0], parts * FILES_OF_A_PART
    names = [f"shard.{number % FILES_OF_A_PART:05d}.mds" for number in range(count)]
    numbers = [np.full(count, value) for value in (one.bytes, one.samples)]
    hashes = np.full(count, int(one.hash, 16), np.uint64)
    files = pa.StructArray.from_arrays(
        [pa.array(names), *map(pa.array, numbers), pa.array(hashes)], fields=list(MDS_FILE)
    )
    tars = [f"{number:05d}" for number in range(parts)]
    columns = {
        "tar": tars,
        "generation": [0] * parts,
        "part": [f"{tar}.{number:08x}" for number, tar in enumerate(tars)],
        "etag": [""] * parts,
        "samples": [one.samples * FILES_OF_A_PART] * parts,
        "table": row["table"].to_pylist() * parts,
        "digest": [number.to_bytes(32, "big") for number in range(parts)],
        "files": pa.ListArray.from_arrays(np.arange(0, count + 1, FILES_OF_A_PART, dtype=np.int32), files),
    }
    table = pa.table({name: columns[name] for name in SCHEMA.names}, schema=SCHEMA)
    index = content_id(table)
    BucketIndex(bucket=BUCKET, segments=(save_segment(there, table),)).save(there, index)
    Manifest(number=1, buckets={BUCKET: BucketSize(id=index, **sizes([table]))}, recalled={}).save(there)
    return real


@pytest.mark.parametrize(
    "num_ranks, parts", [(2, 100), pytest.param(16, 10_000, marks=pytest.mark.slow, id="16 ranks, a million files")]
)
def test_first_step(num_ranks: int, parts: int, latents: Path, store: OneFile, tmp_path: Path) -> None:
    store.real = put_root(latents, "s3://million/root", parts)
    streams = [{"root": "s3://million/root", "bucket": BUCKET}]
    data = {"streams": streams, "num_workers": 1, "num_canonical_nodes": 2, "cache": str(tmp_path / "cache")}
    batch = {"global_batch_size": num_ranks, "microbatch_size": 1}
    fields = train_fields(latents, tmp_path / "run", max_steps=3, data=data, **batch)
    store.asked.clear()
    processes = ranks.start(tmp_path / "log", ["--config", str(write_config(tmp_path, fields))], num_ranks)
    began = max(psutil.Process(process.pid).create_time() for process in processes)
    lines = tmp_path / "run" / "metrics.jsonl"
    while not read_json_lines(lines):
        assert any(process.is_alive() for process in processes), (tmp_path / "log").read_text()[-5000:]
        time.sleep(0.05)
    seconds, asked = time.time() - began, dict(store.asked)
    assert ranks.wait(processes, 300) == [0] * num_ranks, (tmp_path / "log").read_text()[-5000:]
    print(f"\n{num_ranks} ranks, {psutil.cpu_count()} cores: first step after {seconds:.1f} s; asked by then: {asked}")
    assert len(read_json_lines(lines)) == 3
    # one rank finds the index, and one rank makes the machine's tables
    assert asked["segments"] <= 6, asked
