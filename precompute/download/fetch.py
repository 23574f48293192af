"""One shard, in a worker process: rows → img2dataset → check → published tar."""

import contextlib
import errno
import importlib.util
import json
import math
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from precompute.download import opener
from precompute.download.config import DownloadConfig
from precompute.download.rows import PlannedTar, read_rows
from precompute.download.verify import check_tar
from shards.base.durable import fsync_folder, fsync_tree, write_atomically
from shards.base.errors import RequestError, WorkError

RECEIPT = "latentmill"  # our section of img2dataset's stats
ATTEMPTS_NAME = ".attempts"
LOW_SPACE = 2**26  # bytes; a failure with less free than this is put down to it


def require_img2dataset() -> None:
    """Refuse to start where img2dataset cannot run.

    Raises:
        RequestError: it is not installed, or lacks a module that Python 3.13 removed.
    """
    # imghdr: Python 3.13 has it no more, and the extra brings it back
    missing = [name for name in ("img2dataset", "imghdr") if importlib.util.find_spec(name) is None]
    if missing:
        raise RequestError(
            f"{' and '.join(missing)}: not installed. Install the extra: pip install 'latentmill[download]'."
        )


def _import_img2dataset() -> Any:
    os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # or its import asks the Internet for a newer version
    with _hidden("torch", "ray"):  # it would load both and use neither: 700 MB a process instead of 200
        from img2dataset import downloader, resizer, writer

    return downloader.Downloader, resizer.Resizer, writer.WebDatasetSampleWriter


@contextlib.contextmanager
def _hidden(*names: str) -> Iterator[None]:
    """While the context is open, these modules seem not to be installed."""
    hidden = {name: sys.modules.get(name) for name in names}
    sys.modules |= dict.fromkeys(names)  # type: ignore[arg-type]  # None stands for a module that cannot be imported
    try:
        yield
    finally:
        for name, module in hidden.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module


def fetch_tar(config: DownloadConfig, shard: PlannedTar) -> dict[str, Any]:
    """Download one shard into a private folder, check it, and move it into `config.output`.

    `NNNNN_stats.json` is moved last: a shard whose stats are there is whole. Where the shard fails, what img2dataset
    printed is kept as `NNNNN.log`.

    Returns:
        the published stats.

    Raises:
        WorkError: the tar is not what its records say, too few pictures came, or the input is damaged.
        OSError: the disk is full.
    """
    folder = config.output / ATTEMPTS_NAME / f"{shard.name}-{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    log = config.output / f"{shard.name}.log"
    try:
        with log.open("w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
            _download(config, shard, folder)
        found = check_tar(folder, shard.name, shard.num_rows, config)
        stats = _publish(config, shard, folder, found)
        log.write_text("")
        return stats
    except (WorkError, OSError) as error:
        # img2dataset swallows errors of writing single samples, so that a full disk shows as samples that are missing
        if shutil.disk_usage(config.output).free < LOW_SPACE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(config.output)) from error
        raise WorkError(f"{error}{f'; what img2dataset said is in {log}' if log.stat().st_size else ''}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if log.exists() and not log.stat().st_size:
            log.unlink()


def _download(config: DownloadConfig, shard: PlannedTar, folder: Path) -> None:
    downloader_class, resizer_class, writer_class = _import_img2dataset()
    opener.install(config.requests)
    table = read_rows(shard, config.extra_columns)
    with pa.OSFile(str(folder / "rows.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    downloader = downloader_class(
        sample_writer_class=writer_class,
        resizer=resizer_class(
            image_size=config.images.max_side,
            resize_mode="no" if config.images.mode == "original" else config.images.mode,
            resize_only_if_bigger=True,
            encode_quality=config.images.jpeg_quality,
            disable_all_reencoding=config.images.mode == "original",
        ),
        thread_count=config.threads,
        save_caption=True,
        extract_exif=False,
        output_folder=str(folder),
        column_list=table.column_names,
        timeout=config.requests.timeout_seconds,
        number_sample_per_shard=config.rows_per_shard,
        oom_shard_count=5,
        compute_hash="sha256",
        verify_hash_type=None,
        encode_format="jpg",
        retries=config.requests.retries,
        user_agent_token=config.robots.user_agent_token,
        disallowed_header_directives=config.robots.disallowed_directives or None,
    )
    downloader.download_shard((shard.shard_id, str(folder / "rows.arrow")))


def _publish(config: DownloadConfig, shard: PlannedTar, folder: Path, found: dict[str, Any]) -> dict[str, Any]:
    stats_path = folder / f"{shard.name}_stats.json"
    stats = json.loads(stats_path.read_text())
    needed = math.ceil(config.min_success_share * stats["count"])
    if stats["successes"] < needed:
        errors = {text: count for text, count in stats["status_dict"].items() if text != "success"}
        raise WorkError(
            f"{stats['successes']} of {stats['count']} pictures came, where min_success_share asks for {needed}; most "
            f"often: {max(errors, key=errors.__getitem__)}. Is the network there? --min_success_share 0 accepts it"
        )
    stats |= {RECEIPT: found}
    write_atomically(stats_path, json.dumps(stats, indent=2).encode())
    fsync_tree(folder)
    (config.output / stats_path.name).unlink(missing_ok=True)  # of a shard that was damaged since
    for suffix in (".tar", ".parquet", "_stats.json"):
        (folder / f"{shard.name}{suffix}").replace(config.output / f"{shard.name}{suffix}")
        fsync_folder(config.output)
    return stats
