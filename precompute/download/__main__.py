"""Download the images of selected rows into webdataset tars, and verify each tar against its own records.

examples:
  python -m precompute.download --config configs/download.yaml --input runs/data/selected --output runs/data/tars
  python -m precompute.download --config configs/download.yaml --recheck true
"""

import shards.base.interrupt  # noqa: F401

# isort: split

import time

from precompute.download.config import DownloadConfig
from precompute.download.fetch import require_img2dataset
from precompute.download.job import fetch_missing
from precompute.download.report import REPORT_NAME, describe, write_report
from precompute.download.rows import plan_download
from shards.base.config import load_from_args
from shards.base.durable import one_writer
from shards.base.errors import WorkError, console

MAX_REASONS = 5
"""Number of failed tars that the final error names."""


def run(arguments: list[str]) -> None:
    """Run `python -m precompute.download` with these arguments."""
    config = load_from_args(DownloadConfig, arguments, "precompute.download", __doc__)
    require_img2dataset()

    start = time.monotonic()
    tars = plan_download(config)
    with one_writer(config.output):
        fetched, failed = fetch_missing(config, tars)
        report = write_report(config.output, tars, failed, fetched, time.monotonic() - start)
    print(describe(report))
    if failed:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in sorted(failed.items())[:MAX_REASONS])
        if len(failed) > MAX_REASONS:
            reasons += f"; and {len(failed) - MAX_REASONS} more, see {config.output / REPORT_NAME}"
        raise WorkError(
            f"{len(failed)} of {len(tars)} tars could not be downloaded ({reasons}). The other tars are complete. "
            "Run the same command again to retry only the failed ones."
        )


main = console(run)

if __name__ == "__main__":
    main()
