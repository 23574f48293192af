"""The whole selection: filter each file, find duplicates, write what is left, publish it with its funnel."""

import hashlib
import shutil
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from precompute.select.config import SelectConfig
from precompute.select.dedupe import find_drops, rows_to_drop
from precompute.select.filtering import FilteredFile, filter_file
from precompute.select.funnel import build_funnel
from precompute.select.inputs import MetadataFile, find_files, inspect
from precompute.select.optout import hash_listed_urls, read_hosts
from precompute.select.output import OutputFile, plan_outputs, write_output
from precompute.select.parallel import run_all
from precompute.select.plot import draw_funnel
from precompute.select.rules import build_rules
from precompute.select.tally import Tally
from shards.errors import RequestError, WorkError
from shards.files import canonical_json, fsync_tree, sha256_file, write_atomically

FUNNEL_NAME, PLOT_NAME, WORK_NAME = "funnel.json", "funnel.png", ".work"


def select(config: SelectConfig) -> dict[str, Any]:
    """Select rows into `config.output`; the funnel. Nothing is there before all is done; a second call does nothing.

    Raises:
        RequestError: metadata that cannot be read or lacks a column; an output folder with another selection.
        WorkError: a damaged file, no row left.
        OSError: no space.
    """
    hosts = read_hosts(config.urls.opt_out) if config.urls.opt_out else []
    rules = build_rules(config.filters, config.urls, hosts)
    files = [inspect(address, rules.all) for address in find_files(config.metadata)]
    request = _digest(config, files)
    run = config.output / WORK_NAME / f"run-{request[:16]}"
    if (finished := _read_finished(config.output, request, run)) is not None:
        return finished
    run.mkdir(parents=True, exist_ok=True)

    progress = _Progress(sum(file.num_rows for file in files))
    filtered = run_all(filter_file, [(config, file, hosts) for file in files], config.processes, progress.add)
    drops = _find_drops(config, run, [file.folder for file in filtered])
    dropped = [rows_to_drop(drops, number) for number in range(len(filtered))]
    kept = [file.rows_out - len(opted_out) - len(doubles) for file, (opted_out, doubles) in zip(filtered, dropped, strict=True)]
