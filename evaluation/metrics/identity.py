"""What names a metric: all that changes its number but the model. Numbers of two ids are never compared."""

import hashlib
from typing import Any

from shards.base.durable import canonical_json
from shards.base.errors import RequestError

NOT_THE_METRIC = ("seed",)
"""Of the drawing: another draw of the same."""


def metric_id(name: str, extractor: dict[str, Any], drawing: dict[str, Any], reference: str | None) -> str:
    """Over the metric, the extractor with its resize, how pictures are drawn and stored, N, prompts and reference."""
    kept = {key: value for key, value in drawing.items() if key not in NOT_THE_METRIC}
    content = {"metric": name, "extractor": extractor, "drawing": kept, "reference": reference}
    return hashlib.sha256(canonical_json(content)).hexdigest()[:16]


def check_comparable(rows: list[dict[str, Any]]) -> None:
    """See that numbers of one name, from any runs, are of one metric.

    Raises:
        RequestError: they are not.
    """
    first: dict[str, dict[str, Any]] = {}
    for row in rows:
        before = first.setdefault(row["metric"], row)
        if row["id"] != before["id"]:
            raise RequestError(
                f"{row['metric']} {row['id']} ({row['model']}) and {before['metric']} {before['id']} "
                f"({before['model']}) are two metrics: they differ in the extractor, N, prompts, reference or sampler, "
                f"so their numbers say nothing of each other. Evaluate both models under one config."
            )
