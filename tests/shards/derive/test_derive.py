"""A derived root equals the root that stage 1 would have written, or the derivation is refused."""

import errno
import fcntl
import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from precompute.config import PrecomputeConfig, describe_encoding, make_recipe
from precompute.encode import worker
from shards.__main__ import run as shards
from shards.base.errors import Preempted, RequestError, WorkError
from shards.base.store import LocalStore
from shards.derive import job
from shards.derive.job import missing, prepare, rules_of
from shards.format.encoding import EncodingRecord
from shards.format.receipts import active_parts
from shards.root.committed import list_commits, load_receipts
from shards.root.exclusions import exclusion_ids
from shards.root.index import write_indexes
from shards.root.provenance import source_sha256
from shards.root.reading import read_part, text_latents
from shards.root.shared import load_uncond
from shards.tools.verify import verify_root
from tests.fixtures import encode_all, folder_of, precompute_config
from tests.ranks import SERVER
from tests.roots import parts
from tests.tiny import flip_a_bit
from tests.tiny_towers import config_of, texts

pytestmark = pytest.mark.heavy

SMALL = ("--image.storage", "int8", "--text.storage", "float8", "--text.trim", "true", "--image.posterior", "mean")


WIDER = ("--text.storage", "float16", "--text.trim", "false", "--image.storage", "float16")


def derive(source: Path, out: Path, *options: str, in_processes: bool = False) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        if in_processes:  # forked from a server that has imported torch
            patch.setattr("shards.base.pool.multiprocessing.get_context", lambda method: SERVER)
        else:
            patch.setattr("shards.base.pool.start_pool", lambda most, *_: ThreadPoolExecutor(most))
        shards(["derive", str(source), str(out), *options])
    return out


def check_sound(root: Path) -> None:
    assert list(verify_root(LocalStore(root))) == []


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory, models: Path, tars: Path, towers: Path) -> Path:
    """A root with two captions per sample, two text towers and a feature tower."""
    config = config_of(
        models, tars, tmp_path_factory.mktemp("roots") / "many", towers, captions=["txt", "json:blip_caption"]
    )
    encode_all(config)
    return folder_of(config)


def test_it_is_what_stage_1_makes_of_the_tars(latents: Path, models: Path, tars: Path, tmp_path: Path) -> None:
    derived = derive(latents, tmp_path / "derived", *SMALL, in_processes=True)
    asked = {"image": {"storage": "int8"}, "text": {"storage": "float8", "trim": True}, "posterior": "mean"}
    encode_all(config := precompute_config(models, tars, tmp_path / "direct", **asked))
    direct = folder_of(config)
    assert EncodingRecord.load(LocalStore(derived)).id == EncodingRecord.load(LocalStore(direct)).id
    # names are derived from the content, so the bytes are the same
    assert parts(derived) == parts(direct) and len(parts(derived)) == 4
    assert (derived / "uncond.safetensors").read_bytes() == (direct / "uncond.safetensors").read_bytes()
    for bucket in ("64x64", "128x128"):
        assert (derived / bucket / "index.json").read_bytes() == (direct / bucket / "index.json").read_bytes()
    check_sound(derived)
    # a derived root can itself be the source of a derivation
    assert parts(derive(derived, tmp_path / "again")) == parts(direct)


def test_several_captions_and_towers(many: Path, models: Path, tars: Path, tmp_path: Path, towers: Path) -> None:
    derived = derive(
        many,
        tmp_path / "derived",
        *("--towers", "texts.t5", "texts.clip"),
        *("--text.trim", "true", "--text.storage", "t5=float8"),
    )
    asked = texts(towers, models, storage="float8")
    captions = ["txt", "json:blip_caption"]
    config = config_of(
        models, tars, tmp_path / "direct", towers, captions=captions, texts=asked, features={}, text={"trim": True}
    )
    encode_all(config)
    assert parts(derived) == parts(folder_of(config))
    check_sound(derived)


def test_receipts_name_their_source(latents: Path, tmp_path: Path) -> None:
    derived = derive(latents, tmp_path / "derived", "--text.storage", "float8", "--buckets", "64x64")
    id, folders = EncodingRecord.load(LocalStore(latents)).id, parts(latents)
    receipts = load_receipts(LocalStore(derived))
    assert len(receipts) == 2
    for receipt in receipts:
        origin = str(receipt.settings["derived_from"])
        assert origin.split("/", 1)[0] == id and origin.split("/", 1)[1] in folders
        assert receipt.settings["derived_from.host"] == os.uname().nodename
        assert receipt.made_by is not None and receipt.made_by.source_sha256 == source_sha256()
    again = derive(derived, tmp_path / "again")
    ours, theirs = (load_receipts(LocalStore(root))[0].settings for root in (again, derived))
    assert str(ours["derived_from"]).split("/", 1)[1] in parts(derived)
    assert ours["derived_from.host"] == theirs["derived_from.host"]  # the machine that encoded the original part


def test_what_is_excluded_is_left_out_and_counted(root: Path, tmp_path: Path) -> None:
    everything = {sample["key"] for folder in parts(root) for sample in read_part(root / folder)}
    gone = sorted(everything)[2::9]
    shards(["exclude", str(root), "--keys", *gone])
    derived = derive(root, tmp_path / "derived")
    keys = {sample["key"] for folder in parts(derived) for sample in read_part(derived / folder)}
    assert everything - keys == set(gone) and len(gone) > 2
    excluded = sum(receipt.refused.get("excluded", 0) for receipt in load_receipts(LocalStore(derived)))
    assert excluded == sum(receipt.samples for receipt in load_receipts(LocalStore(root))) - sum(
        receipt.samples for receipt in load_receipts(LocalStore(derived))
    )
    check_sound(derived)
    assert exclusion_ids(LocalStore(derived)) == exclusion_ids(LocalStore(root))  # for tars that are added later


def test_the_same_command_again_makes_what_is_left_or_was_recalled(
    latents: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    derived = derive(latents, tmp_path / "derived", "--text.storage", "float8")
    whole = parts(derived)
    (derived / "commits" / "64x64" / "00001.json").unlink()  # as if it had been killed before this point
    shards(["recall", str(derived), "--node", os.uname().nodename])
    assert parts(derived) == {}
    derive(latents, derived, "--text.storage", "float8")
    assert parts(derived) == whole
    assert {receipt.generation for receipt in load_receipts(LocalStore(derived))} == {0, 1}
    assert "30 samples in 64x64" in capsys.readouterr().out


@pytest.mark.parametrize("damaged", ["64x64/00001", "128x128/00001"])
def test_a_damaged_part_gets_no_new_receipt(latents: Path, root: Path, tmp_path: Path, damaged: str) -> None:
    """The tar's other part is derived, whichever of the two comes first."""
    (folder,) = (root / name for name in parts(root) if name.startswith(f"{damaged}."))
    flip_a_bit(folder / "shard.00000.mds", -5)
    with pytest.raises(
        WorkError, match=r"1 of 2 tars could not be derived: 00001: .*shard.00000.mds is missing or damaged"
    ):
        derive(root, tmp_path / "derived")
    derived = {name.split(".")[0] for name in parts(tmp_path / "derived")}
    assert derived == {name.split(".")[0] for name in parts(root)} - {damaged} and len(derived) == 3
    shutil.copytree(latents, root, dirs_exist_ok=True)
    assert len(parts(derive(root, tmp_path / "derived"))) == 4


def test_a_temporary_folder_without_locks_is_named(
    latents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers that cannot start would be reported as if the machine had run out of memory."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(RequestError, match=r"latentmill-\d+\.scratch does not support file locks"):
        derive(latents, tmp_path / "derived")
    assert not (tmp_path / "derived").exists()


def test_what_is_not_there_cannot_be_asked_for(latents: Path, tmp_path: Path, towers: Path) -> None:
    small = derive(latents, tmp_path / "small", *SMALL)
    with pytest.raises(RequestError) as refusal:
        derive(small, tmp_path / "out", *WIDER)
    for part in (
        "image.storage: int8 is stored, and the float16 precision cannot be restored",
        "texts.text.storage: float8 is stored, and the float16 precision cannot be restored",
        "texts.text.trim: the states of padding tokens are not stored",
    ):
        assert part in str(refusal.value)
    with pytest.raises(RequestError, match=r"was written with a different encoding: .*texts.text.storage"):
        derive(latents, small, "--image.storage", "int8", "--image.posterior", "mean", "--text.trim", "true")


def test_trim_is_refused_where_states_depend_on_padding(models: Path, tars: Path, tmp_path: Path, towers: Path) -> None:
    of_flux = texts(towers, models, masked=False)
    unmasked = config_of(models, tars, tmp_path / "flux", towers, texts=of_flux, features={})
    encode_all(unmasked)
    with pytest.raises(RequestError, match=r"texts.t5.trim: T5EncoderModel attends to padding"):
        derive(folder_of(unmasked), tmp_path / "out", "--text.trim", "true")
    derive(folder_of(unmasked), tmp_path / "out", "--text.trim", "clip=true")


def derive_by_config(config: PrecomputeConfig, source: Path) -> Path:
    """Derive like a worker of `precompute --source`, in this process."""
    encoding, out = describe_encoding(config), folder_of(config)
    config = config.model_copy(update={"source": source})
    rules = {str(bucket): rule for bucket, rule in config.to_fill.rules.items()}
    how, tars = prepare(LocalStore(source), LocalStore(out), encoding, rules, may_encode=True)
    recipe = make_recipe(config, encoding, how)
    for tar in missing(LocalStore(out), tars):
        with pytest.MonkeyPatch.context() as patch:  # this process keeps its temporary folder
            patch.setattr(worker, "scratch_of_process", lambda scratch: None)
            worker.encode_on_worker(tar, 1, lambda samples: None, recipe, out, "cpu", 1, source_sha256())
    write_indexes(LocalStore(out))
    return out


@pytest.mark.parametrize(("before", "how"), [("text", "together"), ("t5", "one_by_one")])
def test_a_text_tower_is_added_without_a_picture(
    before: str, how: str, models: Path, tars: Path, tmp_path: Path, towers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever tower the root had before, the result equals a root encoded with both."""
    one = {"text": {"model": str(models / "text_encoder"), "tokenizer": str(models / "tokenizer")}}
    asked: dict[str, Any] = {"texts": {**one, "t5": texts(towers, models)["t5"]}, "features": {}}
    asked["buckets"] = ["64x64", "128x128"]
    first = config_of(models, tars, tmp_path / "first", towers, **asked | {"texts": {before: asked["texts"][before]}})
    encode_all(first)
    direct = config_of(models, tars, tmp_path / "direct", towers, **asked)
    encode_all(direct)
    monkeypatch.setattr("precompute.encode.worker.ImageEncoder", None)  # the VAE is not even loaded
    config = config_of(models, tars, tmp_path / "derived", towers, **asked)
    workers = config.workers.model_copy(update={"towers": how})
    derived = derive_by_config(config.model_copy(update={"workers": workers}), folder_of(first))
    check_sound(derived)
    ours, theirs = LocalStore(derived), LocalStore(folder_of(direct))
    encoding = EncodingRecord.load(ours)
    assert encoding.id == EncodingRecord.load(theirs).id
    for mine, other in zip(load_receipts(ours), load_receipts(theirs), strict=True):
        assert (mine.folder, mine.captions) == (other.folder, other.captions)
        new = "t5" if before == "text" else "text"
        assert {stage for stage in mine.seconds if stage.startswith("device.")} == {f"device.texts.{new}"}
        assert 0 < mine.seconds["device"] <= mine.seconds["encode"] <= mine.seconds["total"]
        assert {"fetch", "write", "upload"} < mine.seconds.keys()
    empty, reference = load_uncond(ours), load_uncond(theirs)
    assert empty["t5"].states is not None and reference["t5"].states is not None
    assert empty["t5"].states.equal(reference["t5"].states) and empty.keys() == {"text", "t5"}
    sample = next(read_part(derived / next(iter(parts(derived)))))
    assert text_latents(sample, encoding)[0]["t5"].any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"buckets": ["64x64"], "aspect": {"bases": [128], "step": 64, "max_ratio": 1.0}},
            r"latents fills bucket 128x128 by the rule `covers`.*`nearest",
        ),
        ({"features": {"dino": {"model": "TOWERS/dino"}}}, r"features.dino: the root has no such feature tower"),
    ],
)
def test_what_needs_pictures_is_refused_before_a_root_is_made(
    latents: Path, models: Path, tars: Path, tmp_path: Path, towers: Path, changes: dict[str, Any], message: str
) -> None:
    changes = json.loads(json.dumps(changes).replace("TOWERS", str(towers)))
    with pytest.raises(RequestError, match=message):
        derive_by_config(precompute_config(models, tars, tmp_path / "out", **changes), latents)
    assert not (tmp_path / "out").exists()


def test_what_the_source_recalls_is_derived_anew(
    root: Path, models: Path, tars: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, config = root, precompute_config(models, tars, root)
    derived = derive(source, tmp_path / "derived", *SMALL)
    whole = parts(derived)
    shards(["recall", str(source), "--node", os.uname().nodename])
    (source / "commits" / "64x64" / "00001.g0.recalled").unlink()  # except this receipt
    derive(source, derived, *SMALL)
    assert "Recalled 3 parts of" in capsys.readouterr().out
    assert parts(derived).keys() == {name for name in whole if name.startswith("64x64/00001.")}
    encode_all(config)  # re-encoded on a good machine, with different content
    for receipt in load_receipts(LocalStore(source)):
        assert receipt.generation == (receipt.folder.split(".")[0] != "64x64/00001")
    derive(source, derived, *SMALL)
    assert parts(derived) == whole
    # re-encoded with the same content, so nothing is recalled again
    derive(source, derived, *SMALL)
    assert parts(derived) == whole and "recalled" not in capsys.readouterr().out
    check_sound(derived)


def test_a_missing_tokenizer_is_found_before_a_root_is_made(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = EncodingRecord.load(LocalStore(root))
    texts = {
        name: tower.model_copy(
            update={"tokenizer": tower.tokenizer.model_copy(update={"name": str(tmp_path / "moved")})}
        )
        for name, tower in record.texts.items()
    }
    (root / "encoding.json").write_bytes(record.model_copy(update={"texts": texts}).sealed())
    with pytest.raises(RequestError, match="moved"):
        derive(root, tmp_path / "out", "--text.trim", "true")
    assert not (tmp_path / "out").exists()
    derive(root, tmp_path / "out", "--text.storage", "float8")  # this conversion needs no tokenizer


def test_receipts_are_not_all_read_to_find_the_tars(latents: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, read = LocalStore(latents), list[str]()
    read_many = LocalStore.read_many

    def counting(self: LocalStore, names: list[str]) -> dict[str, bytes]:
        read.extend(names)
        return read_many(self, names)

    monkeypatch.setattr(LocalStore, "read_many", counting)
    found = active_parts(list_commits(store))
    assert set(found) == {(tar, bucket) for tar in ("00000", "00001") for bucket in ("64x64", "128x128")}
    assert rules_of(store, found) == {"64x64": "covers", "128x128": "covers"} and len(read) == 2  # of four


def kill_process(*arguments: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def signal_both(*arguments: object) -> None:
    """Signal all processes, as Slurm and service managers do: a worker dies, and its parent is signalled too."""
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None
    for process in (parent.pid, os.getpid()):
        os.kill(process, signal.SIGTERM)


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        (kill_process, WorkError, "A worker process was killed while deriving tars"),
        (signal_both, Preempted, "Stopped by a signal before all tars were derived"),
    ],
)
def test_a_process_that_is_killed_or_signalled_ends_the_command(
    latents: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[..., None],
    error: type[Exception],
    message: str,
) -> None:
    monkeypatch.setattr(job, "_derive_in_process", fault)
    with pytest.raises(error, match=message):
        derive(latents, tmp_path / "out", "--processes", "1", in_processes=True)
