"""Metric ids: hashes of everything except the model that affects a value. Only values with equal ids are comparable."""

import hashlib
from typing import Any

from shards.base.durable import canonical_json
from shards.base.errors import RequestError

NOT_IN_ID = ("seed",)
"""Drawing fields excluded from the id: another seed gives another draw of the same metric."""


def metric_id(name: str, extractor: dict[str, Any], drawing: dict[str, Any], reference: str | None) -> str:
    """Return 16 hex digits that identify a metric.

    Args:
        name: name of the metric.
        extractor: the extractor's description, including the hash of its weights and its resizing.
        drawing: how images are drawn and stored, including their number and the hash of the prompts.
        reference: id of the reference, or None for metrics without one.
    """
    kept = {key: value for key, value in drawing.items() if key not in NOT_IN_ID}
    content = {"metric": name, "extractor": extractor, "drawing": kept, "reference": reference}
    return hashlib.sha256(canonical_json(content)).hexdigest()[:16]


def check_comparable(rows: list[dict[str, Any]]) -> None:
    """Check that all values of a metric, from any runs, have the same metric id.

    Raises:
        RequestError: two values of the same metric have different ids.
    """
    first: dict[str, dict[str, Any]] = {}
    for row in rows:
        before = first.setdefault(row["metric"], row)
        if row["id"] != before["id"]:
            raise RequestError(
                f"{row['metric']} {row['id']} ({row['model']}) and {before['metric']} {before['id']} "
                f"({before['model']}) are different metrics: they differ in the extractor, the number of images, the "
                f"prompts, the reference or the sampler, so their values cannot be compared. Evaluate both models with "
                f"the same config."
            )
