"""Indexes of parts that stage 1 did not write."""

import json
from typing import Any

import pytest

from shards.base.errors import RequestError
from shards.format.mds import Column, parse_index
from shards.format.mds_writer import file_config


@pytest.mark.parametrize(
    "change",
    [
        {"format": "json"},
        {"compression": "zstd"},
        {"samples": "many"},
        {"raw_data": {}},
        *({"raw_data": {"basename": name}} for name in ("/etc/a", "../a")),
    ],
)
def test_an_index_that_stage_1_did_not_write_is_refused(change: dict[str, Any]) -> None:
    columns = [Column.of("key", "str")]
    entry = file_config(columns) | {"samples": 3, "raw_data": {"basename": "a"}}
    assert parse_index(json.dumps({"shards": [entry]}).encode(), "here") == [("a", 3, columns)]
    with pytest.raises(RequestError, match=r"^here .* this root"):
        parse_index(json.dumps({"shards": [entry | change]}).encode(), "here")
