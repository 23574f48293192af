"""The fingerprint of a run: the settings and data that determine its loss curve and may not change during the run.

A run resumes from a checkpoint only if their fingerprints match, and all processes must have the same fingerprint.
"""

import json
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object

from shards.base.errors import RequestError
from train.data import order
from train.data.spec import DataConfig, DataSpec
from train.model.backbone import BackboneConfig
from train.model.network import class_name
from train.objective.config import ObjectiveConfig

INDEX_FIELDS = ("samples", "selection_sha256", "index_sha256", "exclusions")
"""Fields of a stream's fingerprint that change when parts or exclusions are added to its root."""


def make_fingerprint(
    seed: int,
    global_batch_size: int,
    data: DataConfig,
    spec: DataSpec,
    objective: ObjectiveConfig,
    unet: Any,
    backbone: BackboneConfig | None = None,
    **optional: Any,
) -> dict[str, Any]:
    """Return the fingerprint of a run.

    Args:
        optional: entries for features that not every run uses; those that are None are left out.
    """
    resolved = (backbone or BackboneConfig()).called.resolved(spec.texts)
    return {
        "seed": seed,
        "global_batch_size": global_batch_size,
        "num_canonical_nodes": data.num_canonical_nodes,
        "shuffle": data.shuffle,
        "order": order.VERSION,
        "shuffle_block": data.shuffle_block,
        "streams": [
            {
                "bucket": stream.config.bucket,
                "weight": stream.config.weight,
                "samples": stream.num_samples,
                "selection_sha256": stream.selection.sha256 if stream.selection is not None else None,
                "index_sha256": stream.found.index,
                "encoding_id": stream.found.encoding.id,
                "filter": bounds.model_dump(mode="json") if (bounds := stream.config.filter or data.filter) else None,
                "latents": {"scale": list(spec.image.scale), "shift": list(spec.image.shift)},
                "exclusions": list(stream.found.exclusions),
            }
            for stream in spec.streams
        ],
        "backbone": {"class": class_name(unet.config), **resolved.model_dump(mode="json", exclude_defaults=True)},
        "objective": objective.model_dump(mode="json"),
        "unet": {key: value for key, value in sorted(unet.config.items()) if not key.startswith("_")},
        **{name: value for name, value in optional.items() if value is not None},
    }


def check_resume(folder: Path, saved: dict[str, Any], current: dict[str, Any], allow_newer_index: bool = False) -> None:
    """Check that the fingerprint of a checkpoint matches that of the run that resumes it.

    Args:
        folder: the checkpoint's folder, for the error message.
        saved: fingerprint of the checkpoint.
        current: fingerprint of the run.
        allow_newer_index: do not compare INDEX_FIELDS, because the run switches to the newest indexes of its roots.

    Raises:
        RequestError: the fingerprints differ; the message lists the fields.
    """
    current = json.loads(json.dumps(current))  # turns tuples into lists, as saving did
    # validation does not change the weights, so it can be added, changed or removed during a run
    saved, current = (
        {key: value for key, value in fields.items() if key != "validation"} for fields in (saved, current)
    )
    # network fields that the checkpoint lacks were added by a later version of diffusers and have default values
    current["unet"] = {name: value for name, value in current["unet"].items() if name in saved["unet"]}
    if allow_newer_index:
        for fields in (saved, current):
            fields["streams"] = [
                {key: value for key, value in stream.items() if key not in INDEX_FIELDS} for stream in fields["streams"]
            ]
    differences = [line for key in current | saved for line in _differences(key, saved.get(key), current.get(key))]
    if differences:
        raise RequestError(
            f"{folder} was trained with different settings: {'; '.join(differences)} (checkpoint ≠ this run). Restore "
            f"the original settings, or choose a different run_dir. To start the new run from these weights, set "
            f"init_from."
        )


def _differences(name: str, left: Any, right: Any) -> list[str]:
    """Return a line for each innermost field that differs between two JSON values. `name`: path of the values."""
    if isinstance(left, dict) and isinstance(right, dict):
        return [line for key in left | right for line in _differences(f"{name}.{key}", left.get(key), right.get(key))]
    if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        pairs = enumerate(zip(left, right, strict=True), 1)
        return [line for i, (a, b) in pairs for line in _differences(f"{name}[{i}]" if len(left) > 1 else name, a, b)]
    if name == "streams" and left is not None:  # all fields of all streams would hide the cause
        return [f"number of streams: {len(left)} ≠ {len(right)}"]
    return [] if left == right else [f"{name}: {left} ≠ {right}"]


def check_same_everywhere(accelerator: Accelerator | None, fingerprint: dict[str, Any], problem: str | None) -> None:
    """Check that all processes have the same fingerprint and that none found a problem. All processes must call this.

    Processes with different data would train on some samples twice and never on others.

    Args:
        problem: error message about this process's data files; None: they are valid.

    Raises:
        RequestError: a process has a problem, or the fingerprints differ. All processes raise it.
    """
    own = [(json.dumps(fingerprint, sort_keys=True, default=str), problem)]
    gathered = own if accelerator is None else gather_object(own)
    for _, found in gathered:
        if found is not None:
            raise RequestError(found)
    if len({text for text, _ in gathered}) > 1:
        fingerprints = [json.loads(text) for text, _ in gathered]
        first, names = fingerprints[0], set().union(*fingerprints)
        differing = sorted(key for key in names if any(other.get(key) != first.get(key) for other in fingerprints))
        raise RequestError(
            f"The processes opened different data: they do not agree on {', '.join(differing)}, because their configs "
            f"or their copies of a root differ. Use the same config and the same roots on all machines."
        )
