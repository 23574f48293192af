"""Commands read all receipts of a root without keeping them, and their results do not change."""

import shutil
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.kit.receipts import synthetic_receipt
from bench.kit.roots import encoding_record
from evaluation.report.page import data
from examples.shapes.report import root_totals
from precompute.preview import pick_samples
from shards.__main__ import run
from shards.base.errors import WorkError
from shards.base.store import LocalStore, read_each
from shards.format.receipts import Receipt, parse_receipt
from shards.format.tables import CAPTION_CHANGES, read_tables
from shards.open import open_store
from shards.root.committed import load_receipts
from shards.tools.clean import named_parts
from shards.tools.recall import RecallFilter, node_totals, recall_candidates
from shards.tools.stats import root_stats
from shards.tools.verify import verify_root
from tests.random_roots import HOSTS, random_root
from tests.roots import load_tars

pytestmark = pytest.mark.heavy

TARS, BUCKETS = 60, ("256x256", "512x512")
MOST_ALIVE = 8
"""Limit on receipts in memory: those of two or three tars."""


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root of 120 receipts without parts."""
    root = tmp_path_factory.mktemp("many")
    encoding_record(4, 4).save(LocalStore(root))
    for bucket in BUCKETS:
        (root / "commits" / bucket).mkdir(parents=True)
        for number in range(TARS):
            started = {"started": "2026-11-24T00:00:00+00:00"}
            receipt = synthetic_receipt(f"{number:05d}", bucket).model_copy(update=started)
            (root / receipt.name).write_bytes(receipt.sealed())
    return root


class Alive:
    """Counts receipts that were parsed and not yet released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = self.most = self.parsed = 0
        for module in ("shards.root.committed", "shards.root.publish", "shards.tools.verify"):
            monkeypatch.setattr(f"{module}.parse_receipt", self.parse)

    def parse(self, data: bytes, where: str) -> Receipt:
        receipt = parse_receipt(data, where)
        self.parsed += 1
        self.now += 1
        self.most = max(self.most, self.now)
        weakref.finalize(receipt, self.gone)
        return receipt

    def gone(self) -> None:
        self.now -= 1


def write_report(root: Path) -> None:
    streams = [{"root": str(root), "bucket": BUCKETS[0]}]
    runs: list[Any] = [SimpleNamespace(name="run", config={"data": {"streams": streams}})]
    assert "cannot be read" not in "".join(data(runs))


COMMANDS: dict[str, Callable[[Path], object]] = {
    "stats": lambda root: run(["stats", str(root), "--max-samples", "0"]),
    "card": lambda root: run(["card", str(root)]),
    "by-node": lambda root: run(["by-node", str(root)]),
    "recall": lambda root: run(["recall", str(root), "--since", "2000-01-01", "--dry-run"]),
    "verify": lambda root: run(["verify", str(root)]),
    "clean": lambda root: named_parts(open_store(root)),
    "report": write_report,
    "demo's report": lambda root: root_totals(open_store(root)),
    "preview": lambda root: pick_samples(open_store(root), BUCKETS[0], 2 * TARS),
}
EXPECTED_ERRORS = {"verify": WorkError, "preview": WorkError}
"""Errors about missing parts, which are expected."""


@pytest.mark.parametrize("name", COMMANDS)
def test_the_receipts_in_memory_do_not_grow_with_the_root(
    many: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive = Alive(monkeypatch)
    if name in EXPECTED_ERRORS:
        with pytest.raises(EXPECTED_ERRORS[name]):
            COMMANDS[name](many)
    else:
        COMMANDS[name](many)
    assert alive.parsed >= TARS  # `preview` needs the receipts of one bucket
    assert 0 < alive.most <= MOST_ALIVE


def test_receipts_that_are_kept_exceed_the_limit(many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Alive(monkeypatch)
    receipts = load_receipts(open_store(many))
    assert kept.most == len(receipts) == len(BUCKETS) * TARS > MOST_ALIVE


@pytest.mark.parametrize("seed", range(4))
def test_what_commands_add_up_is_what_all_receipts_say(
    tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_store(random_root(tmp_path / "root", seed))
    receipts, books = load_receipts(store), load_tars(store)
    places = [(receipt.tar, receipt.bucket) for receipt in receipts]
    assert places == sorted(set(places)) and len(places) == len(list((tmp_path / "root" / "commits").rglob("*.json")))
    assert [tar.tar for tar in books] == sorted({receipt.tar for receipt in receipts})
    assert [receipt for tar in books for receipt in tar.parts.values()] == receipts
    stats = root_stats(store, 5)
    assert stats["shards"] == len(books)
    assert stats["samples_in"] == sum(tar.samples_in for tar in books)
    assert stats["encoded"] == sum(tar.encoded for tar in books)
    assert stats["rejected"] == sum((Counter(tar.rejected) for tar in books), Counter())
    # captions are counted once from the parts' tables, no matter how many buckets hold a sample
    captions = dict.fromkeys(("stored", *CAPTION_CHANGES), 0)
    for tar in books:
        rows: dict[str, tuple[int, ...]] = {}
        for part in tar.parts.values():
            stored, _ = read_tables(store, part.folder, part.files)
            columns = (stored[name] for name in ("captions", *CAPTION_CHANGES))
            rows |= zip(stored["key"], zip(*columns, strict=True), strict=True)
        for name, column in zip(captions, zip(*rows.values(), strict=True), strict=False):
            captions[name] += sum(column)
    assert stats["captions"] == captions and captions["stored"] == stats["encoded"]
    run(["card", store.where()])
    changes = ", ".join(f"{name} {captions[name]:,}" for name in CAPTION_CHANGES)
    assert f"Of {captions['stored']:,} captions: {changes}." in capsys.readouterr().out
    for bucket, found in stats["buckets"].items():
        parts = [receipt for receipt in receipts if receipt.bucket == bucket]
        samples = sum(part.samples for part in parts)
        size = sum(file.bytes for part in parts for file in part.mds)
        assert (found["samples"], found["bytes_per_sample"]) == (samples, round(size / samples) if samples else 0)
        assert found.get("measured_on", 0) == min(5, samples)
    for node in node_totals(store):
        made = [part for part in receipts if part.made_by and part.made_by.gpu_uuid == node["gpu_uuid"]]
        tars, attempts = {part.tar: part.samples_in for part in made}, {part.token: part.seconds for part in made}
        assert node["parts"] == len(made) and node["samples"] == sum(part.samples for part in made)
        assert node["samples_in"] == sum(tars.values())
        assert node["seconds"]["encode"] == round(sum(seconds["encode"] for seconds in attempts.values()), 1)
    for host, _, uuid in HOSTS:
        made = [part for part in receipts if part.made_by and part.made_by.gpu_uuid == uuid]
        found = recall_candidates(store, RecallFilter(host, uuid, None))
        assert [(one.name, one.folder, one.token, one.samples) for one in found] == [
            (part.name, part.folder, part.token, part.samples) for part in made
        ]
    assert named_parts(store) == {receipt.folder for receipt in receipts}


def test_verify_names_all_that_is_wrong(tmp_path: Path) -> None:
    """Damage parts, tables and receipts of several tars, and the index."""
    store = open_store(random_root(tmp_path / "root", 1))
    assert list(verify_root(store)) == []
    first, *_, last = [receipt for receipt in load_receipts(store) if receipt.samples]
    (tmp_path / "root" / first.folder / "refused.parquet").unlink()
    (tmp_path / "root" / last.folder / "samples.parquet").write_bytes(b"x")
    with (tmp_path / "root" / last.bucket / "index.json").open("a") as file:
        file.write(" ")
    lines = [line.replace(f"{tmp_path}/root/", "") for line in verify_root(store)]
    assert lines[0] == f"{first.folder}/refused.parquet is missing"
    assert lines[1].startswith(f"{last.folder}/samples.parquet is 1 byte long, but its receipt records ")
    assert lines[2].startswith(f"{last.bucket}/index.json does not match the receipts") and len(lines) == 3
    # the index is only compared if all receipts can be read
    path = tmp_path / "root" / first.name
    path.write_bytes(path.read_bytes()[:-9])
    lines = [line.replace(f"{tmp_path}/root/", "") for line in verify_root(store)]
    assert first.name in lines[0] and lines[1].startswith(f"{last.folder}/samples.parquet") and len(lines) == 2


def test_a_settings_values_are_counted_by_tar(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = open_store(random_root(tmp_path / "root", 2))
    run(["card", store.where()])
    card = capsys.readouterr().out
    for section, key in (("settings", "batch_size"), ("settings", "salvage"), ("software", "torch")):
        tars = [{str(getattr(part, section).get(key)) for part in tar.parts.values()} for tar in load_tars(store)]
        counts = Counter(value for values in tars for value in values)
        ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        assert len(ordered) > 1
        listed = ", ".join(f"{value} ({count} shard{'s' if count > 1 else ''})" for value, count in ordered)
        assert f"| {key} | {listed} |" in card


def test_of_a_setting_with_many_values_the_card_shows_some(
    latents: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`derived_from` of a derived root, for example, has a different value for each part."""
    store = LocalStore(shutil.copytree(latents, tmp_path / "root"))
    (receipt, *_) = load_receipts(store)
    for number in range(30):
        settings = receipt.settings | {"origin": f"part {number:02d}"}
        more = receipt.model_copy(update={"tar": f"more{number:02d}", "settings": settings})
        assert store.create(more.name, more.sealed())
    run(["card", store.where()])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| origin |")]
    assert line.startswith("| origin | None (2 shards), part 00 (1 shard), ") and line.endswith(
        ", and 21 more values |"
    )


def test_small_files_are_read_ahead_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, requests = LocalStore(tmp_path), list[list[str]]()

    def read_many(names: list[str]) -> dict[str, bytes]:
        requests.append(names)
        return LocalStore.read_many(store, names)

    monkeypatch.setattr(store, "read_many", read_many)
    monkeypatch.setattr("shards.base.store.READ_AHEAD", 4)
    names = [f"{(7 * number) % 23:02d}" for number in range(23)]
    for name in set(names) - {"05"}:
        (tmp_path / name).write_text(name)
    got = []
    for name, content in read_each(store, names):
        assert content == name.encode()
        assert len(requests) <= (names.index(name) // 4 + 1) + 1  # the batch in use and the next one
        got.append(name)
    assert got == [name for name in names if name != "05"]
    assert requests == [names[first : first + 4] for first in range(0, 23, 4)]
    assert list(read_each(store, [])) == []
    requests.clear()
    next(read_each(store, names))  # the rest is not read if the caller stops
    assert 1 <= len(requests) <= 2
