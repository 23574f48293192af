"""Summary of a download, from the stats of the published tars, for the terminal and download_report.json."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from precompute.download.fetch import RECEIPT
from precompute.download.rows import PlannedTar
from precompute.input.tars import SUCCESS
from shards.base.durable import canonical_json, write_atomically

REPORT_NAME = "download_report.json"
# Kind of failure → pattern of its messages, which come from urllib, http.client, ssl, our opener and img2dataset. The
# first match wins.
KINDS = {
    "robots": r"X-Robots-Tag",
    "private_address": r"private address",
    "too_large": r"^too large",
    "hash_mismatch": r"^hash mismatch",
    "deadline": r"^deadline",
    "redirect_loop": r"infinite loop|Redirection to url|HTTP Error 30[12378]",
    "not_http": r"unknown url type|no host given|InvalidURL|URL can't contain|nonnumeric port",
    "http_403": r"HTTP Error 403",
    "http_404": r"HTTP Error 404",
    "http_410": r"HTTP Error 410",
    "http_429": r"HTTP Error 429",
    "http_4xx": r"HTTP Error 4\d\d",
    "http_5xx": r"HTTP Error 5\d\d",
    "http_other": r"HTTP Error",
    "tls": r"SSL|CERTIFICATE|certificate|TLS",
    "dns": r"Name or service not known|name resolution|No address associated|getaddrinfo|'idna'",
    "timeout": r"timed out|Timeout",
    "refused": r"Connection refused",
    "cut": r"IncompleteRead|closed connection without|Connection reset|bytes read",
    "unreachable": r"unreachable|No route",
}


def write_report(
    output: Path, tars: list[PlannedTar], failed: dict[str, str], fetched: int, seconds: float
) -> dict[str, Any]:
    """Summarise the published tars of the plan in a report, write it to `output`, and return it.

    Args:
        failed: name of each tar that failed in this run → reason.
        fetched: number of tars published in this run.
        seconds: wall-clock time of this run.
    """
    published = [stats_path(output, tar) for tar in tars if tar.name not in failed]
    stats = [json.loads(path.read_text()) for path in published if path.exists()]
    totals = {name: sum(item[name] for item in stats) for name in ("count", "successes")}
    failures, formats = Counter[str](), Counter[str]()
    for item in stats:
        formats.update(item[RECEIPT]["formats"])
        for message, count in item["status_dict"].items():
            if message != SUCCESS:
                failures[kind_of(message)] += count
    report = {
        "rows": sum(tar.num_rows for tar in tars),
        "shards": {"planned": len(tars), "published": len(stats), "fetched_now": fetched, "failed": failed},
        "published_rows": totals["count"],
        "successes": totals["successes"],
        "success_share": round(totals["successes"] / totals["count"], 4) if stats else None,
        "failures": dict(failures.most_common()),
        "formats": dict(formats.most_common()),
        "tar_bytes": sum(item[RECEIPT]["tar_bytes"] for item in stats),
        "shard_seconds": round(sum(item["duration"] for item in stats), 2),
        "run_seconds": round(seconds, 2),
    }
    write_atomically(output / REPORT_NAME, canonical_json(report))
    return report


def stats_path(output: Path, tar: PlannedTar) -> Path:
    """Return the path of a tar's stats, as written by img2dataset. The file exists only once the tar is published."""
    return output / f"{tar.name}_stats.json"


def describe(report: dict[str, Any]) -> str:
    """Format the report for the terminal."""
    shards, count = report["shards"], report["published_rows"]
    lines = [
        f"{shards['published']} of {shards['planned']} tars are complete, {shards['fetched_now']} of them downloaded "
        f"in this run ({report['run_seconds']:.1f} s); {len(shards['failed'])} failed."
    ]
    if count:
        share, size = 100 * report["success_share"], report["tar_bytes"] / 1e6
        lines.append(f"{count:,} rows: {report['successes']:,} images ({share:.1f} %), {size:,.1f} MB of tars")
    lines += [f"  {number:>12,}  {kind}" for kind, number in report["failures"].items()]
    if report["formats"]:
        formats = ", ".join(f"{name} {number:,}" for name, number in report["formats"].items())
        lines.append(f"images by format (magic bytes): {formats}")
    return "\n".join(lines)


def kind_of(message: str) -> str:
    """Return the kind of failure that an error message describes, or `other`. For an image that cannot be re-encoded,
    this is stage 1's reason for rejecting it."""
    if rejected := re.search(r"Image decoding error: (\w+)", message):
        return rejected[1]
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, message)), "other")
