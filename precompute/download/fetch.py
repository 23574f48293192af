"""Download one tar in a worker process: read its rows, run img2dataset, verify the result, and publish it."""

import contextlib
import errno
import hashlib
import importlib.util
import io
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Iterator
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow as pa

from precompute.download import opener
from precompute.download.config import DownloadConfig
from precompute.download.rows import PlannedTar, read_rows
from precompute.download.shrink import keep, shrink
from precompute.download.verify import check_tar
from shards.base.durable import fsync_folder, fsync_tree, write_atomically
from shards.base.errors import RequestError, WorkError

RECEIPT = "latentmill"
"""Key of latentmill's section in img2dataset's stats file."""
ATTEMPTS_NAME = ".attempts"
LOW_SPACE = 2**26
"""Free space in bytes below which a failure is attributed to a full disk."""


def require_img2dataset() -> None:
    """Raise RequestError unless img2dataset and the module `imghdr`, which it needs, are installed."""
    # Python 3.13 removed imghdr from its standard library; the download extra installs a replacement
    missing = [name for name in ("img2dataset", "imghdr") if importlib.util.find_spec(name) is None]
    if missing:
        raise RequestError(
            f"The download needs {' and '.join(missing)}, which cannot be found. In a clone, run "
            f"`make setup`; otherwise, install the package with its download extra, as docs/how-to/install.md says."
        )


def _import_img2dataset() -> Any:
    os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # otherwise albumentations checks PyPI for updates
    # img2dataset imports both but uses neither; without them, a process takes 200 MB rather than 700
    with _hidden("torch", "ray"):
        from img2dataset import downloader, writer

    class Writer(writer.WebDatasetSampleWriter):
        """Writer that records the hash of the stored image, because img2dataset hashes the download before it is
        re-encoded."""

        def write(self, img_str: bytes | None, key: str, caption: str | None, meta: dict[str, Any]) -> None:
            if img_str is not None:
                meta["sha256"] = hashlib.sha256(img_str).hexdigest()
            super().write(img_str, key, caption, meta)

    return downloader.Downloader, Writer


@contextlib.contextmanager
def _hidden(*names: str) -> Iterator[None]:
    """Make the modules `names` appear to be missing inside the block."""
    hidden = {name: sys.modules.get(name) for name in names}
    sys.modules |= dict.fromkeys(names)  # type: ignore[arg-type]  # importing a module whose entry is None fails
    try:
        yield
    finally:
        for name, module in hidden.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module


def fetch_tar(config: DownloadConfig, tar: PlannedTar) -> dict[str, Any]:
    """Download one tar into a private folder, verify it, move it into `config.output`, and return its stats.

    `NNNNN_stats.json` is moved last, so a tar whose stats exist is complete. If the download fails, the output of
    img2dataset is kept in `NNNNN.log`.

    Raises:
        WorkError: The tar does not match its records, too few images were downloaded, or the input is damaged.
        OSError: The disk is full.
    """
    folder = config.output / ATTEMPTS_NAME / f"{tar.name}-{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    log = config.output / f"{tar.name}.log"
    try:
        with _open_log(log) as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
            _download(config, tar, folder)
        receipt = check_tar(folder, tar.name, tar.num_rows, config)
        stats = _publish(config, tar, folder, receipt)
        log.write_text("")
        return stats
    except (WorkError, OSError) as error:
        # img2dataset swallows errors while writing a sample, so a full disk shows up as missing samples
        if shutil.disk_usage(config.output).free < LOW_SPACE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(config.output)) from error
        hint = f"; see the output of img2dataset in {log}" if log.stat().st_size else ""
        raise WorkError(f"{error}{hint}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if log.exists() and not log.stat().st_size:
            log.unlink()


class _LogFile(io.FileIO):
    """Log that drops what cannot be written. If a message from img2dataset raised an error, img2dataset would leave its
    loop over the images, and wait forever for the threads that it still feeds."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def _open_log(path: Path) -> io.TextIOWrapper:
    return io.TextIOWrapper(cast(BinaryIO, _LogFile(path, "w")), "utf-8", errors="backslashreplace", write_through=True)


def _download(config: DownloadConfig, tar: PlannedTar, folder: Path) -> None:
    downloader_class, writer_class = _import_img2dataset()
    images = config.images
    smaller = partial(shrink, max_side=images.max_side, quality=images.jpeg_quality)
    table = read_rows(tar, config.extra_columns)
    opener.install(config.requests, config.robots, expected_hashes(table) if config.verify else None)
    with pa.OSFile(str(folder / "rows.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    downloader = downloader_class(
        sample_writer_class=writer_class,
        resizer=keep if images.mode == "original" else smaller,
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
        disallowed_header_directives=None,  # the opener checks them
    )
    downloader.download_shard((tar.shard_id, str(folder / "rows.arrow")))


def expected_hashes(table: pa.Table) -> dict[str, set[tuple[str, str]]]:
    """Return the hashes of images that a tar's rows contain, by URL, as (algorithm, digest)."""
    found: dict[str, set[tuple[str, str]]] = {}
    for algorithm, length in (("md5", 32), ("sha256", 64)):
        name = f"source_{algorithm}"
        if name not in table.column_names or not pa.types.is_string(table.schema.field(name).type):
            continue
        for url, digest in zip(table["url"].to_pylist(), table[name].to_pylist(), strict=True):
            if url and digest and re.fullmatch(rf"[0-9a-fA-F]{{{length}}}", digest):
                found.setdefault(url.strip(), set()).add((algorithm, digest.lower()))
    return found


def _publish(config: DownloadConfig, tar: PlannedTar, folder: Path, receipt: dict[str, Any]) -> dict[str, Any]:
    """Add `receipt` to the stats, and move the tar's files into `config.output`; return the stats. Raises WorkError if
    the share of successful rows is below `min_success_share`."""
    stats_path = folder / f"{tar.name}_stats.json"
    stats = json.loads(stats_path.read_text())
    needed = math.ceil(Fraction(str(config.min_success_share)) * stats["count"])  # 7 % of 100 images are 7
    if stats["successes"] < needed:
        errors = {text: count for text, count in stats["status_dict"].items() if text != "success"}
        raise WorkError(
            f"only {stats['successes']} of {stats['count']} images were downloaded, but min_success_share requires "
            f"{needed}; the most frequent error is: {max(errors, key=errors.__getitem__)}. Check the network, or "
            f"accept any share with --min_success_share 0"
        )
    stats |= {RECEIPT: receipt}
    write_atomically(stats_path, json.dumps(stats, indent=2).encode())
    fsync_tree(folder)
    (config.output / stats_path.name).unlink(missing_ok=True)  # left by an earlier, damaged download
    for suffix in (".tar", ".parquet", "_stats.json"):
        (folder / f"{tar.name}{suffix}").replace(config.output / f"{tar.name}{suffix}")
        fsync_folder(config.output)
    return stats
