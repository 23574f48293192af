"""Requests that `python -m shards` refuses without changing the root."""

import os
import shlex
from pathlib import Path

import pytest

from bench.kit.roots import encoding_record
from shards.__main__ import run
from shards.base.durable import read_sealed_json, write_sealed_json
from shards.base.errors import RequestError, exit_code_of
from shards.base.store import LocalStore
from tests.roots import tree

REFUSALS = {
    "recall": "recall needs --node, --gpu, --since or --part",
    "recall --node '' --since 2020-01-01": "--node is empty, perhaps because a shell variable is not set",
    "recall --part ''": "--part is empty, perhaps because a shell variable is not set",
    "recall --since lately": "'lately' is not a valid date or time",
    "exclude --keys": "No values to exclude were given",
    "exclude --hashes abc": "'abc' is not a SHA-256 (64 hex digits)",
    "exclude --urls nonsense": "name neither a URL nor a host:   'nonsense': 'nonsense' is a single label",
    "exclude --urls 'a b' me@example.org": "name neither a URL nor a host:   'a b': contains ' '",
    "exclude --urls a b c d e": "write *.e Nothing was excluded",
    "exclude --urls --file nowhere.txt": "--file nowhere.txt cannot be read",
    "exclude --keys 0123nowhere": "has the key '0123nowhere', so nothing was excluded",
    "exclude --keys a --keys b c": "any of the keys 'a', 'b', 'c'",
    "exclude --keys a b c d e": "any of the keys 'a', 'b', 'c' and 2 more",
    "stats --max-samples -1": "--max-samples must not be negative, but is -1",
    "where 999": "The key 999 was not found in the 2 committed shards of",
    "clean --older-than 59m": "is not an age of at least one hour",
    "derive OUT --towers texts.nobody": "The root has no tower named texts.nobody. Choose from its towers: texts.text",
    "derive OUT --towers": "names no text tower",
    "derive OUT --text.storage float7": "--text.storage float7: Input should be 'float16' or 'float8'",
    "derive OUT --buckets 32x32 --buckets 64x64": "has no samples in 32x32. Buckets with samples: 128x128, 64x64",
    "derive OUT --buckets 64x64 32x32": "has no samples in 32x32. Buckets with samples: 128x128, 64x64",
    "derive OUT --text.joint text": "--text.joint text lists text towers to project jointly, but no projection",
    "derive OUT --processes 0": "--processes must be at least 1, but is 0",
    "derive ROOT": "cannot be derived from itself",
    "derive FILE": "encoding.json is not a folder. Choose a folder that this user can write to",
    "stats --plot ROOT": "root cannot be written",
    "card --output ROOT": "root: Is a directory). Choose the path of a file in a folder that you can write to",
    "card --output FILE/README.md": "encoding.json/README.md cannot be written",
}


@pytest.mark.parametrize(("words", "message"), REFUSALS.items())
def test_refusals(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, message: str) -> None:
    before = tree(root)
    places = {"OUT": tmp_path / "out", "ROOT": root, "FILE": root / "encoding.json"}
    places["FILE/README.md"] = places["FILE"] / "README.md"
    command, *options = (str(places.get(word, word)) for word in shlex.split(words))
    assert exit_code_of(lambda: run([command, str(root), *options])) == RequestError.exit_code
    assert message in capsys.readouterr().err.replace("\n", " ")
    assert tree(root) == before and os.listdir(tmp_path) == ["root"]


def test_what_is_no_root_or_is_empty(tmp_path: Path) -> None:
    for command in ("verify", "stats", "index"):
        with pytest.raises(RequestError, match="is not a latents root"):
            run([command, str(tmp_path)])
    (tmp_path / "file").touch()
    with pytest.raises(RequestError, match="file is not a latents root"):
        run(["verify", str(tmp_path / "file")])
    encoding_record(4, 4).save(LocalStore(tmp_path))
    for command in ("stats", "card"):
        with pytest.raises(RequestError, match="has no committed shards yet"):
            run([command, str(tmp_path)])


def test_another_version_is_named(root: Path) -> None:
    path = root / "commits" / "64x64" / "00000.json"
    write_sealed_json(path, read_sealed_json(path) | {"version": 3})
    other = "has format version 3, but this version of latentmill reads only version 2"
    with pytest.raises(RequestError, match=other):
        run(["stats", str(root)])
    fields = read_sealed_json(root / "encoding.json")
    write_sealed_json(root / "encoding.json", fields | {"schema_version": 3})
    with pytest.raises(RequestError, match=other):
        run(["verify", str(root)])
    for name, wrong in (
        ("captions", r"different version of latentmill.*\(captions\)"),
        ("id", "records the encoding id None"),
    ):
        write_sealed_json(root / "encoding.json", {field: fields[field] for field in fields if field != name})
        with pytest.raises(RequestError, match=wrong):
            run(["verify", str(root)])
