"""What a folder of tars holds, from the stats of its published shards: printed, and kept as download_report.json."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from precompute.download.fetch import RECEIPT
from precompute.download.rows import PlannedTar
from precompute.download.verify import SUCCESS
from shards.base.durable import canonical_json, write_atomically

REPORT_NAME = "download_report.json"
# kind: the texts of it (urllib's, http.client's, ssl's, our opener's and img2dataset's own), tried in this order
KINDS = {
    "robots": r"X-Robots-Tag",
    "private_address": r"private address",
    "too_large": r"^too large",
    "deadline": r"^deadline",
    "redirect_loop": r"infinite loop|Redirection to url",
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
    "not_an_image": r"Image decoding error",
}


def write_report(
    output: Path, shards: list[PlannedTar], failed: dict[str, str], fetched: int, seconds: float
) -> dict[str, Any]:
    """Sum up every published shard of the plan; write the report and return it.

    Args:
        failed: shard name → reason, for those that failed in this run.
        fetched: shards published in this run.
        seconds: wall time of this run.
    """
    stats = [json.loads(path.read_text()) for shard in shards if (path := stats_path(output, shard)).exists()]
    totals = {name: sum(item[name] for item in stats) for name in ("count", "successes")}
    failures, formats = Counter[str](), Counter[str]()
    for item in stats:
        formats.update(item[RECEIPT]["formats"])
        for message, count in item["status_dict"].items():
            if message != SUCCESS:
                failures[kind_of(message)] += count
    report = {
        "rows": sum(shard.num_rows for shard in shards),
        "shards": {"planned": len(shards), "published": len(stats), "fetched_now": fetched, "failed": failed},
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


def stats_path(output: Path, shard: PlannedTar) -> Path:
    """img2dataset's record of a shard; there once the shard is published."""
    return output / f"{shard.name}_stats.json"


def describe(report: dict[str, Any]) -> str:
    shards, count = report["shards"], report["published_rows"]
    lines = [
        f"{shards['published']} of {shards['planned']} shards are published, {shards['fetched_now']} of them now "
        f"({report['run_seconds']:.1f} s); {len(shards['failed'])} failed."
    ]
    if count:
        share, size = 100 * report["success_share"], report["tar_bytes"] / 1e6
        lines.append(f"{count:,} rows: {report['successes']:,} pictures ({share:.1f} %), {size:,.1f} MB of tars")
    lines += [f"  {number:>12,}  {kind}" for kind, number in report["failures"].items()]
    if report["formats"]:
        formats = ", ".join(f"{name} {number:,}" for name, number in report["formats"].items())
        lines.append(f"pictures by first bytes: {formats}")
    return "\n".join(lines)


def kind_of(message: str) -> str:
    """The kind of failure that an error text speaks of; `other` where it fits none."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, message)), "other")
