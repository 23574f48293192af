"""The selection job: filter each file, find duplicates, write the remaining rows, and publish them with the funnel."""

import hashlib
import itertools
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa

from precompute.select import duplicates
from precompute.select.config import SelectConfig
from precompute.select.datasets import SPELLINGS, DatasetConfig, recognise
from precompute.select.funnel import build_funnel, draw_funnel
from precompute.select.metadata import (
    WORK_NAME,
    MetadataFile,
    find_files,
    inspect,
    make_layout,
    read_footer,
)
from precompute.select.opt_out import read_hosts, read_urls
from precompute.select.passes import FilteredFile, OutputFile, Plan, filter_file, plan_outputs, write_output
from precompute.select.rules import build_rules
from shards.base.durable import canonical_json, fsync_tree, one_writer, sha256_file, write_atomically
from shards.base.errors import RequestError, WorkError
from shards.base.pool import start_pool
from shards.base.table import counted

FUNNEL_NAME, PLOT_NAME = "funnel.json", "funnel.png"


def select(config: SelectConfig) -> dict[str, Any]:
    """Write the selected rows to `config.output` and return the funnel.

    Outputs are published only after all of them are written, and funnel.json is published last. Calling this again
    resumes an interrupted selection, and does nothing if the selection is finished.

    Raises:
        RequestError: The metadata cannot be read or lacks a column, or the output folder holds a different selection.
        WorkError: An input file is damaged, or no row passes.
        OSError: The disk is full.
    """
    hosts: list[str] = []
    if config.urls.opt_out:
        hosts, num_urls = read_hosts(config.urls.opt_out)
        print(f"Opt-outs in {config.urls.opt_out}: {len(hosts):,} by host, {num_urls:,} by URL.", flush=True)
    addresses = find_files(config.metadata, config.output)
    footers = [read_footer(address) for address in addresses]
    dataset = choose_dataset(config, dict(zip(addresses, (footer.schema for footer in footers), strict=True)))
    rules = build_rules(config.filters, config.urls, hosts, dataset)
    files = [inspect(*found, rules, dataset) for found in zip(addresses, footers, strict=True)]
    layout = make_layout(files, [footer.schema for footer in footers], dataset)
    request = _digest(config, files)
    with one_writer(config.output), workers(config.processes) as run:
        if (finished := _read_finished(config.output, request)) is not None:
            return finished
        folder = _open_run(config.output, request)

        # pass 1: apply the rules that depend only on the row itself
        partitions = duplicates.count_partitions(sum(file.num_rows for file in files), config.partition_rows)
        plan = Plan(dataset, layout, hosts, partitions)
        calls = [(config, file, plan) for file in files]
        filtered = list(_with_progress(run(filter_file, calls), len(files)))

        # pass 2: find opted-out and duplicate URLs among the remaining rows
        drop_calls = _plan_drops(config, folder, [file.folder for file in filtered], partitions)
        drops = list(run(duplicates.find_drops, drop_calls))
        counts = [[len(rows) for rows in duplicates.rows_to_drop(drops, number)] for number in range(len(filtered))]
        kept = [file.rows_out - sum(count) for file, count in zip(filtered, counts, strict=True)]

        # pass 3: write the rows that are left, in input order
        outputs = plan_outputs(sum(kept), config.rows_per_file)
        tallies = run(
            write_output, [(folder, output, filtered, kept, drops, layout, config.buckets) for output in outputs]
        )
        selected = sum(tallies, Counter[str]())

        dropped = _global_rules(config, counts)
        funnel = build_funnel(rules, filtered, dropped, outputs, selected, config.buckets)
        if not outputs:
            raise WorkError(_explain_empty(funnel))
        _publish(config, folder, outputs, {"request": request, "config": _describe_config(config), **funnel})
        return funnel


def choose_dataset(config: SelectConfig, schemas: dict[str, pa.Schema]) -> DatasetConfig:
    """Return the names of the columns of metadata files, and report which dataset they belong to.

    Args:
        schemas: address of each file → its schema.

    Raises:
        RequestError: the files belong to different datasets, or none of them has a column that the config names.
    """
    names = {name for schema in schemas.values() for name in schema.names}
    bounded = [name for name, bound in config.filters.scores.items() if bound is not None]
    required = [*bounded]
    dataset: DatasetConfig
    if config.dataset is not None:
        dataset, title = config.dataset, "as set in `dataset`."
        required += [*dataset.columns.values(), *dataset.keep]
    else:
        recognised = {address: recognise(schema.names) for address, schema in schemas.items()}
        (first, known), *others = recognised.items()
        if other := next((address for address, each in others if each is not known), None):
            raise RequestError(
                f"{first} and {other} belong to different datasets ({known.title}, and {recognised[other].title}). "
                f"Select from one dataset at a time, with --metadata PATH."
            )
        dataset, title = known, f"{known.title}.{f' {known.advice}' if known.advice else ''}"
    if absent := [name for name in required if name not in names]:
        raise RequestError(
            f"{config.metadata} has no column {absent[0]}, which `dataset` or `filters.scores` names. Its columns are "
            f"{', '.join(sorted(names))}."
        )
    print(f"Metadata: {counted(len(schemas), 'file')}. Columns: {title}", flush=True)
    columns = {name: spelling for name, spelling in dataset.columns.items() if spelling in names}
    # bounds on columns that have canonical names need not keep them
    bounded = [name for name in bounded if name not in {*columns.values(), *SPELLINGS}]
    keep = [name for name in dict.fromkeys((*dataset.keep, *bounded)) if name in names]
    return DatasetConfig(columns=columns, keep=keep)


@contextmanager
def workers(processes: int) -> Iterator[Callable[..., Iterator[Any]]]:
    """Provide a function `run(function, calls)` that yields `function(*call)` for each call, in order. It runs the
    calls in `processes` worker processes or, if `processes` is 1, in this process.

    Raises WorkError if a worker process dies; exceptions raised by `function` propagate.
    """
    if processes == 1:
        yield itertools.starmap
        return
    pool = start_pool(processes)
    try:
        yield lambda function, calls: pool.map(function, *zip(*calls, strict=True))
    except BrokenProcessPool:
        raise WorkError(
            "A worker process died (out of memory, or killed). Finished work is kept. Run the same command again "
            "with fewer --processes."
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _global_rules(config: SelectConfig, counts: list[list[int]]) -> dict[str, tuple[str, int]]:
    """Return a dict from the name of each enabled rule of pass 2 to its condition and its number of dropped rows.
    `counts` has the numbers of opted-out and duplicate rows in each file."""
    opted_out, repeated = map(sum, zip(*counts, strict=True))
    rules = {}
    if config.urls.opt_out:
        rules["opt_out"] = ("URL not in the opt-out file", opted_out)
    if config.urls.drop_duplicates:
        rules["duplicate"] = ("the first row with its URL", repeated)
    return rules


def _describe_config(config: SelectConfig) -> dict[str, Any]:
    """Return the config fields that determine the result."""
    return config.model_dump(mode="json", exclude={"output", "processes", "partition_rows"})


def _digest(config: SelectConfig, files: list[MetadataFile]) -> str:
    opt_out = sha256_file(config.urls.opt_out) if config.urls.opt_out else None
    request = {"config": _describe_config(config), "files": [asdict(file) for file in files], "opt_out": opt_out}
    return hashlib.sha256(canonical_json(request)).hexdigest()


def _read_finished(output: Path, request: str) -> dict[str, Any] | None:
    path = output / FUNNEL_NAME
    if not path.exists():
        return None
    try:
        funnel: dict[str, Any] = json.loads(path.read_bytes())
        names = [found["name"] for found in funnel["outputs"]]
    except (ValueError, KeyError, TypeError):
        raise RequestError(
            f"{path} is damaged. Restore it from a backup, or remove {output} and run the same command again."
        ) from None
    if funnel.get("request") != request:
        raise RequestError(
            f"{output} holds a finished selection with different metadata or settings (see {path}), which will not be "
            "overwritten. Choose a different --output, or remove that folder."
        )
    if missing := [name for name in names if not (output / name).is_file()]:
        raise RequestError(
            f"{output} holds this selection, but {missing[0]} is missing. Restore it from a backup, or remove {output} "
            f"and run the same command again."
        )
    shutil.rmtree(output / WORK_NAME, ignore_errors=True)
    print(f"{output} already holds this selection, so there is nothing to do.")
    return funnel


def _open_run(output: Path, request: str) -> Path:
    run = output / WORK_NAME / f"run-{request[:16]}"
    if not run.exists() and any(output.glob("selected-*.parquet")):
        raise RequestError(
            f"{output} holds outputs of a different, unfinished selection. Choose a different --output, or remove "
            f"the selected-*.parquet files there."
        )
    run.mkdir(parents=True, exist_ok=True)
    return run


def _plan_drops(config: SelectConfig, run: Path, filtered: list[Path], partitions: int) -> list[tuple[Any, ...]]:
    """Write the hashes of the opt-out list, if there is one, and return the arguments of `find_drops` for each
    partition. The result is empty if there is neither an opt-out list nor deduplication."""
    opt_out = None
    if config.urls.opt_out:
        opt_out = run / "opt_out"
        with duplicates.HashWriter(opt_out, partitions) as hashes:
            for urls in read_urls(config.urls.opt_out):
                hashes.add(duplicates.hash_urls(urls))
    elif not config.urls.drop_duplicates:
        return []
    names = [f"drops-{index:05d}-of-{partitions:05d}" for index in range(partitions)]
    return [(run / name, index, filtered, opt_out, config.urls.drop_duplicates) for index, name in enumerate(names)]


def _publish(config: SelectConfig, run: Path, outputs: Sequence[OutputFile], funnel: dict[str, Any]) -> None:
    fsync_tree(run)
    for output in outputs:
        if (run / output.name).exists():  # otherwise an earlier, interrupted run has already moved it
            (run / output.name).replace(config.output / output.name)
    write_atomically(config.output / PLOT_NAME, draw_funnel(funnel))
    write_atomically(config.output / FUNNEL_NAME, canonical_json(funnel))
    shutil.rmtree(config.output / WORK_NAME)


def _explain_empty(funnel: dict[str, Any]) -> str:
    if not funnel["rows_in"]:
        return "The metadata has no rows, so nothing was written. Check --metadata."
    worst = max(funnel["rules"], key=lambda step: step["by_value"] + step["no_value"])
    return (
        f"None of the {funnel['rows_in']} rows passed, so nothing was written. The rule `{worst['rule']}` "
        f"({worst['keeps']}) dropped the most rows: {worst['by_value']} because of their value, and "
        f"{worst['no_value']} because they have no value. Relax the filters."
    )


def _with_progress(filtered: Iterable[FilteredFile], num_files: int) -> Iterator[FilteredFile]:
    """Yield the files in `filtered` unchanged, and print a progress line for each of them."""
    rows, start = 0, time.monotonic()
    for number, file in enumerate(filtered, 1):
        rows += file.counts["rows"]
        rate = rows / max(time.monotonic() - start, 1e-3)
        print(
            f"[{number}/{num_files}] {file.source}: {file.counts['rows']:,} rows, {file.rows_out:,} passed "
            f"({rate:,.0f} rows/s so far)",
            flush=True,
        )
        yield file
