"""Receipts that are damaged or contradict themselves."""

import json
from pathlib import Path

import numpy as np
import pytest

from shards.base.durable import DamagedFile, sealed_json
from shards.format.receipts import pack_bits, parse_name, parse_receipt, unpack_bits


@pytest.mark.parametrize("count", [0, 1, 8, 9])
def test_bits_are_restored_and_a_wrong_number_is_refused(count: int) -> None:
    values = np.random.default_rng(count).random(count) < 0.5
    assert unpack_bits(pack_bits(values), count).tolist() == values.tolist()
    with pytest.raises(ValueError, match=r"a bitmap of \d bytes? does not match \d+ samples"):
        unpack_bits(pack_bits(values), count + 8)
    with pytest.raises(ValueError, match="base64"):
        unpack_bits("?" + pack_bits(values), count)


def test_a_sealed_receipt_that_contradicts_itself_is_damaged(latents: Path) -> None:
    path = min(latents.glob("commits/64x64/*.json"))
    fields = {name: value for name, value in json.loads(path.read_text()).items() if name != "sha256"}
    assert parse_receipt(sealed_json(fields), "here").part == fields["part"]
    uncounted = fields["rejects"] | {"odd": pack_bits(np.arange(fields["samples_in"]) == 0)}
    for name, value in (("samples", fields["samples"] + 1), ("part", None), ("rejects", uncounted)):
        with pytest.raises(DamagedFile, match=r"^here is inconsistent: .*\. Restore it from a backup\.$"):
            parse_receipt(sealed_json({**fields, name: value}), "here")


def test_other_files_are_no_receipts() -> None:
    assert parse_name("commits/64x64/00000.json") == ("64x64", "00000", 0, False)
    for name in ("tars/64x64/0.json", "commits/64x64/0.txt", "commits/64x64/.0.json", "commits/64x64/0/0.json"):
        assert parse_name(name) is None
