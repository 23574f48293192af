"""Offline wandb, whose files show what was logged, and results files as `evaluation watch` writes them."""

import json
import struct
import time
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from PIL import Image

from shards.base.store import Store


def use_offline_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    """Configure wandb to write to local files only, or skip the test if wandb is not installed."""
    pytest.importorskip("wandb")
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)


def wait_for_next_second() -> None:
    """Wait until a new launch gets a folder of its own, because wandb names it by the second.

    In a process of its own, importing wandb takes longer than that.
    """
    time.sleep(1.1)


def logged_rows(run_dir: Path) -> list[dict[str, Any]]:
    """Return every row that the launches of a run logged, in order: name → value, with wandb's own step as `_step`."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    rows = []
    for path in sorted((run_dir / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        for data in read_records(path.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items})
    return rows


def read_records(content: bytes) -> Iterator[bytes]:
    """Yield the records of a wandb file: wandb's header, then LevelDB's log format.

    The format has blocks of 32 KiB, and splits a record that does not fit into its block.
    """
    assert content[:4] == b":W&B"
    at, record = 7, b""
    while len(content) - at >= 7:
        left_in_block = 32768 - at % 32768
        if left_in_block < 7:
            at += left_in_block
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            yield record
            record = b""


def png_of_step(step: int) -> bytes:
    """Return a PNG file that is different for every step."""
    content = BytesIO()
    Image.new("RGB", (40, 20), (step, 0, 0)).save(content, "PNG")
    return content.getvalue()


def write_results(run: Store, step: int, **values: float) -> None:
    """Write a results file with a valid image."""
    write_results_with_picture(run, step, png_of_step(step), values)


def write_results_with_picture(run: Store, step: int, picture: bytes, values: dict[str, float]) -> None:
    """Write a results file with one image, which need not be a valid PNG."""
    content = BytesIO()
    with ZipFile(content, "w") as archive:
        archive.writestr("values.json", json.dumps({"step": step, "values": values}))
        archive.writestr("evaluation/samples/own.png", picture)
    assert run.create(f"tracker/evaluations/{step:010d}.00000000.zip", content.getvalue())
