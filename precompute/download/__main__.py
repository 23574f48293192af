"""Selected rows → webdataset tars of pictures and captions, each held against img2dataset's own counts.

examples:
  python -m precompute.download --config configs/download.yaml --input runs/data/selected --output runs/data/tars
  python -m precompute.download --config configs/download.yaml --recheck true
"""

import time

from precompute.download.config import DownloadConfig
from precompute.download.fetch import require_img2dataset
from precompute.download.job import fetch_missing
from precompute.download.report import describe, write_report
from precompute.download.rows import plan_download
from shards.base.config import load_from_args
from shards.base.durable import locked
from shards.base.errors import WorkError, console


def run(arguments: list[str]) -> None:
    config = load_from_args(DownloadConfig, arguments, "precompute.download", __doc__)
    require_img2dataset()

    start = time.monotonic()
    shards = plan_download(config)
    with locked(config.output / ".lock"):
        fetched, failed = fetch_missing(config, shards)
        report = write_report(config.output, shards, failed, fetched, time.monotonic() - start)
    print(describe(report))
    if failed:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in sorted(failed.items()))
        raise WorkError(
            f"{len(failed)} of {len(shards)} shards failed ({reasons}). The others are published and stay; "
            "the same command again tries just these."
        )


main = console(run)

if __name__ == "__main__":
    main()
