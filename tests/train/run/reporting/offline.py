"""What wandb was told while it was offline, as its own files have it; and sheets as a watcher leaves them."""

import json
import struct
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from PIL import Image

from shards.base.store import Store


def go_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """Every row of every launch, in order: name → value, wandb's own step as `_step`."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    found = []
    for path in sorted((run_dir / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        for data in records(path.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                found.append({"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items})
    return found


def records(content: bytes) -> Iterator[bytes]:
    """Of a file in LevelDB's log format, behind wandb's header: in blocks of 32 KiB; a record may go on in the next."""
    assert content[:4] == b":W&B"
    at, whole = 7, b""
    while len(content) - at >= 7:
        room = 32768 - at % 32768
        if room < 7:
            at += room
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last piece
            yield whole
            whole = b""


def picture_of(step: int) -> bytes:
    """Encode the picture of a checkpoint's sheet."""
    picture = BytesIO()
    Image.new("RGB", (40, 20), (step, 0, 0)).save(picture, "PNG")
    return picture.getvalue()


def leave(run: Store, step: int, **values: float) -> None:
    """Leave a sheet of a checkpoint, with a valid picture."""
    leave_with(run, step, picture_of(step), values)


def leave_with(run: Store, step: int, picture: bytes, values: dict[str, float]) -> None:
    """Leave a sheet of a checkpoint whose picture has the given bytes."""
    packed = BytesIO()
    with ZipFile(packed, "w") as sheet:
        sheet.writestr("values.json", json.dumps({"step": step, "values": values}))
        sheet.writestr("evaluation/samples/own.png", picture)
    assert run.create(f"tracker/evaluations/{step:010d}.00000000.zip", packed.getvalue())
