"""What a folder of tars holds, from the stats of its published shards: printed, and kept as download_report.json."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from precompute.download.failures import count_kinds
from precompute.download.fetch import RECEIPT
from precompute.download.shard import InputShard
from shards.base.files import canonical_json, write_atomically

REPORT_NAME = "download_report.json"


def write_report(
    output: Path, shards: list[InputShard], failed: dict[str, str], fetched: int, seconds: float
) -> dict[str, Any]:
    """Sum up every published shard of the plan; write the report and return it.

    Args:
        failed: shard name → reason, for those that failed in this run.
        fetched: shards published in this run.
        seconds: wall time of this run.
    """
    stats = [json.loads(path.read_text()) for shard in shards if (path := stats_path(output, shard)).exists()]
    totals = {name: sum(item[name] for item in stats) for name in ("count", "successes")}
    report = {
        "rows": sum(shard.num_rows for shard in shards),
        "shards": {"planned": len(shards), "published": len(stats), "fetched_now": fetched, "failed": failed},
        "published_rows": totals["count"],
        "successes": totals["successes"],
        "success_share": round(totals["successes"] / totals["count"], 4) if stats else None,
        "failures": dict(sum((count_kinds(item["status_dict"]) for item in stats), Counter[str]()).most_common()),
        "formats": dict(sum((Counter(item[RECEIPT]["formats"]) for item in stats), Counter[str]()).most_common()),
        "tar_bytes": sum(item[RECEIPT]["tar_bytes"] for item in stats),
        "shard_seconds": round(sum(item["duration"] for item in stats), 2),
        "run_seconds": round(seconds, 2),
    }
    write_atomically(output / REPORT_NAME, canonical_json(report))
    return report


def stats_path(output: Path, shard: InputShard) -> Path:
    """img2dataset's record of a shard; there once the shard is published."""
    return output / f"{shard.name}_stats.json"


def describe(report: dict[str, Any]) -> str:
    """The report in a few lines for the terminal."""
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
