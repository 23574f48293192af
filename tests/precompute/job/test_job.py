"""The command and its job, without Ray."""

import gzip
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from precompute.__main__ import run as command
from precompute.config import PrecomputeConfig, describe_encoding, make_recipe
from precompute.encode.worker import encode_on_worker
from precompute.input.find import choose_units, find_input
from precompute.input.tars import TarUnit
from precompute.job.ledger import Ledger
from precompute.job.run import announce, other_tars_warning, table_warning
from shards.base.errors import RequestError, UnfitNode, WorkError, exit_code_of
from shards.base.store import LocalStore
from shards.root.provenance import source_sha256
from tests.fixtures import precompute_config
from tests.roots import ONE_BUCKET, precompute_arguments, tree
from tests.tiny import make_samples, make_tar

AVAILABLE = [TarUnit(f"{i:05d}", f"/tars/{i:05d}.tar", LocalStore(Path("/tars")), f"{i:05d}.tar") for i in range(12)]


@pytest.mark.parametrize(
    ("wanted", "numbers"),
    [
        ("all", range(12)),
        ("00003", [3]),
        ("00003-00005", [3, 4, 5]),
        ("00007,00001-00002, 00007", [1, 2, 7]),  # each once, in order
    ],
)
def test_choosing(wanted: str, numbers: list[int]) -> None:
    assert [int(shard.name) for shard in choose_units(wanted, AVAILABLE)] == list(numbers)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("00012", "This unit does not exist: 00012. The input contains 12 units: 00000 to 00011"),
        ("00010-00016", r"00012, 00013, 00014, 00015, 00016\. The"),
        ("00010-00017", "00012, 00013, 00014, 00015, 00016 and more"),
        ("00000-99999999999999", "00012, 00013, 00014, 00015, 00016 and more"),
        ("3", "This unit does not exist: 3"),
        ("00005-00003", "the end of the range 00005-00003 is before its start"),
        ("a-b", "--shards a-b is not a selection of units. Use 00042, 00000-00099"),
    ],
)
def test_wrong_choices(wanted: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        choose_units(wanted, AVAILABLE)


@pytest.mark.parametrize("wanted", ["cc12m-train-0000", "0000"])
def test_units_without_numbers_are_only_selected_together(wanted: str) -> None:
    unit = replace(AVAILABLE[0], name="cc12m-train-0000")
    with pytest.raises(RequestError, match=r"not numbers, such as cc12m-train-0000, can only be selected with all\."):
        choose_units(wanted, [unit])


def test_a_job_continues_where_an_earlier_one_stopped(
    without_ray: None, models: Path, tars: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = precompute_arguments(models, tars, tmp_path / "root", buckets=ONE_BUCKET)
    command([*arguments, "--shards", "00000"])
    assert "Tars: 1 encoded (23 samples in, 15 accepted, 8 rejected), 0 already done" in capsys.readouterr().out
    command(arguments)
    said = capsys.readouterr().out
    assert "Tars: 1 encoded (23 samples in, 15 accepted, 8 rejected), 1 already done, 0 failed" in said
    reasons = re.search(r"Rejected: (.*)\. The refused\.parquet", said)
    assert reasons and sum(int(words.split()[1]) for words in reasons[1].split(", ")) == 8
    command(arguments)
    assert "Tars: 0 encoded (0 samples in, 0 accepted, 0 rejected), 2 already done" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--shards", "00009"], "This unit does not exist: 00009"),
        (["--bukets", "[]"], "did you mean `buckets`?"),
        (["--workers.batch_size", "0"], "`workers.batch_size` = '0': input should be greater than or equal to 1"),
        (["--buckets", '["100x100"]'], "not a multiple of the VAE's downsampling factor, 8"),
        (["--vae", "/absent"], "The model /absent is neither an existing folder nor a hub name"),
        (["--scores", "[]"], "`scores` = []: value should have at least 1 item"),
        (["--input", "/absent"], "The `input` folder /absent does not exist"),
    ],
)
def test_wrong_requests_write_nothing(
    models: Path, tars: Path, tmp_path: Path, change: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = precompute_arguments(models, tars, tmp_path / "root", *change)
    assert exit_code_of(lambda: command(arguments)) == 2
    error = capsys.readouterr().err.replace("\n", " ")
    assert message in error and error.startswith("error: ")
    assert not (tmp_path / "root").exists()


def test_different_tars_with_the_names_of_a_roots_tars_are_warned_of(
    without_ray: None, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They count as already encoded."""
    folder, moved, root = tmp_path / "tars", tmp_path / "moved", tmp_path / "root"

    def said(input: Path, *words: str) -> str:
        command(precompute_arguments(models, input, root, *words))
        printed = capsys.readouterr()
        return printed.out + printed.err

    make_tar(folder, "00000", make_samples(0, 2, [(200, 150)]), stats=False)
    said(folder)
    folder.rename(moved)
    assert "1 already done" in (found := said(moved)) and "warning" not in found
    make_tar(folder, "00000", make_samples(1, 9, [(200, 150)]), stats=False)
    make_tar(folder, "00001", make_samples(2, 1, [(200, 150)]), stats=False)
    warning = r"warning: \S+/00000\.tar has [\d,]+ bytes, but \S+ had [\d,]+ when it was encoded\. Tars count as"
    assert re.search(warning, found := said(folder)) and "1 encoded" in found and "1 already done" in found
    assert "warning" not in said(folder)  # tar 00001 is the same
    (folder / "00000.tar").write_bytes(gzip.compress((moved / "00000.tar").read_bytes()))
    assert "warning" not in said(folder, "--shards", "00000")
    (receipt, *_) = sorted((root / "commits").rglob("00000.json"))
    receipt.write_bytes(b"{}")
    warned = other_tars_warning(find_input(str(folder)).units(), [], receipt.parent.name, LocalStore(root))
    assert warned is not None and "could not be compared with those in the input" in warned


def test_tars_without_samples_fail(without_ray: None, models: Path, tmp_path: Path) -> None:
    make_tar(tmp_path / "tars", "00000", [], stats=False)
    arguments = precompute_arguments(
        models, tmp_path / "tars", tmp_path / "root", "--captions", "txt", buckets=ONE_BUCKET
    )
    for _ in range(2):
        with pytest.raises(WorkError, match=r"holds no samples: the input was encoded \(1 unit\), but nothing"):
            command(arguments)


def test_tars_without_side_files_are_named_once(
    models: Path, tars: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = Ledger(2)
    ended.done, ended.samples_in, ended.encoded = 2, 46, 46
    monkeypatch.setattr("precompute.__main__.start_ray", lambda workers: None)
    monkeypatch.setattr("precompute.job.run.run_job", lambda *job: ended)
    shutil.copytree(tars, tmp_path / "tars")
    arguments = precompute_arguments(models, tmp_path / "tars", tmp_path / "root")
    command(arguments)
    errors = capsys.readouterr().err
    assert (
        "note: " not in errors
        and f"{tmp_path / 'tars'}, webdataset tars (2 units, 46 samples). Captions: txt" in errors
    )
    (tmp_path / "tars" / "00000_stats.json").unlink()  # the parquet is there
    (tmp_path / "tars" / "00001_stats.json").unlink()
    (tmp_path / "tars" / "00001.parquet").unlink()
    command(arguments)
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "note: " in line)
    assert line.startswith("note: 1 of 2 tars have no NNNNN_stats.json or NNNNN.parquet")


def test_a_root_with_another_encoding_is_left_alone(
    models: Path, tars: Path, latents: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(latents)
    arguments = precompute_arguments(models, tars, latents, "--posterior", "mean", "--pixels.resampling", "lanczos")
    assert exit_code_of(lambda: command(arguments)) == 2
    error = capsys.readouterr().err.replace("\n", " ")
    assert "was written with a different encoding: " in error and "(root ≠ this run)" in error
    assert "image.posterior: 'moments' ≠ 'mean'" in error and "image.resampling: 'bicubic' ≠ 'lanczos'" in error
    assert tree(latents) == before


def test_a_worker_that_fits_no_machine_is_refused(
    models: Path, tars: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise Ray would wait forever without a message."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.init", lambda *_, **__: None)
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 2.0})
    arguments = precompute_arguments(models, tars, tmp_path / "root", "--workers.num_gpus", "1")
    assert exit_code_of(lambda: command(arguments)) == 2
    assert (
        "One worker needs 1 GPU and 1 CPU, but this machine has 0 GPUs and 2 CPUs"
        in capsys.readouterr().err.replace("\n", " ")
    )
    assert not (tmp_path / "root").exists()


def test_a_worker_with_a_different_checkout_encodes_nothing(tmp_path: Path) -> None:
    """Call the worker directly; tests/faults/test_checkout.py starts a real node."""
    unused: Any = None
    found = f"{os.uname().nodename} is running a different version of latentmill than the driver: the SHA-256 of its"
    with pytest.raises(UnfitNode, match=rf"{found} source is {source_sha256()}, and the driver's is f00d\. Nothing "):
        encode_on_worker(unused, 1, unused, unused, tmp_path / "root", "cpu", 1, "f00d")
    assert not (tmp_path / "root").exists()


def test_a_worker_that_does_not_see_the_root_encodes_nothing(
    without_ray: None, models: Path, tars: Path, tmp_path: Path
) -> None:
    config = precompute_config(models, tars, tmp_path / "root")
    recipe = make_recipe(config, describe_encoding(config))
    unused: Any = None
    with pytest.raises(UnfitNode, match="nodes do not share this folder"):
        encode_on_worker(unused, 1, unused, recipe, tmp_path / "root", "cpu", 1, source_sha256())
    assert not (tmp_path / "root").exists()


def test_a_wrong_caption_field_is_warned_of_and_nothing_accepted_fails(
    without_ray: None, models: Path, tars: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    captions = ("--captions", '["json:kaption"]')
    arguments = precompute_arguments(models, tars, tmp_path / "root", *captions, buckets=ONE_BUCKET)
    with pytest.raises(WorkError, match=r"Nothing was accepted: all 46 samples .* rejected, 46 of them as no_caption"):
        command(arguments)
    output, errors = capsys.readouterr()
    said = errors.replace("\n", " ")
    assert said.count("warning: no sample of tar ") == 1
    assert "was accepted, and 23 of its 23 samples have no caption in json:kaption." in said
    assert "json:kaption is absent; the sample has text in txt, json:" in said
    assert "Rejected: no_caption 46." in output
    with pytest.raises(WorkError, match=r"root holds no samples: the input was encoded \(2 units\), but nothing"):
        command(arguments)


def test_a_second_caption_field_that_no_sample_has_is_warned_of(
    without_ray: None, models: Path, tars: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for fields, warned in (('["txt", "json:kaption"]', 1), ('["txt"]', 0)):
        options = ("--captions", fields, "--shards", "00000")
        command(precompute_arguments(models, tars, tmp_path / fields, *options, buckets=ONE_BUCKET))
        said = capsys.readouterr().err.replace("\n", " ")
        assert said.count("warning: `captions` lists 2 fields (txt, json:kaption), but the ") == warned
        assert said.count("so one of the fields may not exist") == warned


def test_another_vae_on_a_root_is_named_with_both_paths(
    models: Path, tars: Path, latents: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(models / "vae", tmp_path / "other")
    (weights,) = (tmp_path / "other").glob("*.safetensors")
    tensors = load_file(weights)
    tensors[next(iter(tensors))] += 1
    save_file(tensors, weights)
    arguments = precompute_arguments(models, tars, latents, "--vae", str(tmp_path / "other"))
    assert exit_code_of(lambda: command(arguments)) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert f"`vae` is a different model: the root was encoded with {models / 'vae'}" in error
    assert f"and this run uses {tmp_path / 'other'}." in error


@pytest.mark.parametrize(("buckets", "odd"), [(["144x112", "256x256"], "144x112"), (["512x512", "320x192"], "")])
def test_buckets_that_a_unet_refuses_are_warned_of(
    buckets: list[str], odd: str, capsys: pytest.CaptureFixture[str]
) -> None:
    announce([1], 1, buckets)
    said = capsys.readouterr().err
    assert (f"warning: the sides of bucket {odd} are not all multiples of 64 px" in said) == bool(odd)
    assert ("warning" in said) == bool(odd)


def test_outputs_that_cannot_be_written_are_refused_first(
    without_ray: None, models: Path, tars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file.txt").touch()
    with pytest.raises(RequestError, match=r"file\.txt is not a folder"):
        command(precompute_arguments(models, tars, tmp_path / "file.txt"))
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)  # root may write everywhere
    with pytest.raises(RequestError, match=r"a/b cannot be created or extended: \S+ is not writable by this user"):
        command(precompute_arguments(models, tars, tmp_path / "a" / "b"))
    assert os.listdir(tmp_path) == ["file.txt"]


def test_a_file_as_input_has_an_absolute_path(
    models: Path, tars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers have other working directories, and a repeated command may have another one, too."""
    monkeypatch.chdir(tars)
    fields = precompute_config(models, tars, tmp_path / "root").model_dump(mode="json")
    config = PrecomputeConfig.model_validate(fields | {"input": "00000.tar"})
    assert config.input == str(tars / "00000.tar")


@pytest.mark.parametrize(
    ("parts", "warns"),
    [
        ([(0, 0, 0), (90, 90, 0)], False),  # the first bucket is empty
        ([(0, 0, 0), (90, 0, 0)], True),
        ([(0, 0, 8)], True),  # all samples were refused, because they have no caption
        ([(0, 0, 0)], False),  # nothing was looked up
    ],
)
def test_all_derived_parts_count_for_the_warning_about_a_table(parts: list[tuple[int, int, int]], warns: bool) -> None:
    """Each part is (samples, those found in the table, those refused for lack of a caption)."""
    receipts: Any = SimpleNamespace(tar="00000", samples_in=100)
    receipts.parts = {
        str(number): SimpleNamespace(
            samples=samples, settings={"derived.tables.vlm.found": found}, refused={"no_caption": refused}
        )
        for number, (samples, found, refused) in enumerate(parts)
    }
    table: Any = SimpleNamespace(columns=("vlm",), place="table", key="key")
    assert (table_warning(receipts, [table]) is not None) == warns
