"""What the loss curve is a function of: a checkpoint goes on only under the same, and all processes see the same."""

import json
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object

from shards.base.errors import RequestError
from train.data import order
from train.data.spec import DataConfig, DataSpec, OpenStream
from train.model.backbone import BackboneConfig
from train.model.unet import class_name
from train.objective.config import ObjectiveConfig

GROWING = ("samples", "selection_sha256", "index_sha256", "exclusions")
"""Of a stream: what changes where parts or exclusions are added to its root."""


def make_fingerprint(
    seed: int,
    global_batch_size: int,
    data: DataConfig,
    spec: DataSpec,
    objective: ObjectiveConfig,
    unet: Any,
    backbone: BackboneConfig | None = None,
    repa: dict[str, Any] | None = None,
    validation: dict[str, Any] | None = None,
    optimizer: str = "adamw",
    train_only: list[str] | None = None,
) -> dict[str, Any]:
    """Return the fingerprint, which every checkpoint stores.

    Args:
        repa: what a layer is aligned with, and how; None without alignment.
        validation: the pinned validation bucket; None without validation.
        optimizer: kind of the optimizer whose state checkpoints hold.
        train_only: patterns of the parameters that are trained; None for all.
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
                "index_sha256": stream.index_sha256,
                "encoding_id": stream.encoding_id,
                "filter": _filter(stream, data),
                "latents": {"scale": list(spec.image.scale), "shift": list(spec.image.shift)},
                "exclusions": list(stream.exclusions),
            }
            for stream in spec.streams
        ],
        "backbone": {"class": class_name(unet.config), **resolved.model_dump(mode="json", exclude_defaults=True)},
        "objective": objective.model_dump(mode="json"),
        "unet": {key: value for key, value in sorted(unet.config.items()) if not key.startswith("_")},
        **({"repa": repa} if repa is not None else {}),
        **({"validation": validation} if validation is not None else {}),
        **({"optimizer": optimizer} if optimizer != "adamw" else {}),
        **({"train_only": train_only} if train_only is not None else {}),
    }


def _filter(stream: OpenStream, data: DataConfig) -> dict[str, Any] | None:
    config = stream.config.filter or data.filter
    return config.model_dump(mode="json") if config else None


def check_resume(folder: Path, saved: dict[str, Any], now: dict[str, Any], grows: bool = False) -> None:
    """Refuse to continue a checkpoint under another data order or objective.

    Args:
        grows: the run takes up what its roots hold now, so the streams may differ in GROWING.

    Raises:
        RequestError: the entries that differ.
    """
    now = json.loads(json.dumps(now))  # as the saved one was: tuples are lists
    # validation does not change the weights, so it can be switched on, off or over during a run
    saved, now = ({key: value for key, value in fields.items() if key != "validation"} for fields in (saved, now))
    # a field that is not in the checkpoint is a later diffusers', at its default
    now["unet"] = {name: value for name, value in now["unet"].items() if name in saved["unet"]}
    if grows:
        saved, now = ({**fields, "streams": _fixed(fields["streams"])} for fields in (saved, now))
    different = [line for key in now | saved for line in _differences(key, saved.get(key), now.get(key))]
    if different:
        raise RequestError(
            f"{folder} was trained under other settings: {'; '.join(different)} (checkpoint ≠ this run). Set them "
            f"back, or give another run_dir (and init_from, to start from these weights)."
        )


def _differences(name: str, here: Any, there: Any) -> list[str]:
    """Where two values of one entry differ: the innermost fields, by their places."""
    if isinstance(here, dict) and isinstance(there, dict):
        return [line for key in here | there for line in _differences(f"{name}.{key}", here.get(key), there.get(key))]
    if isinstance(here, list) and isinstance(there, list) and len(here) == len(there):
        pairs = enumerate(zip(here, there, strict=True), 1)
        return [line for i, (a, b) in pairs for line in _differences(f"{name}[{i}]" if len(here) > 1 else name, a, b)]
    return [] if here == there else [f"{name}: {here} ≠ {there}"]


def _fixed(streams: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in stream.items() if key not in GROWING} for stream in streams]


def check_same_everywhere(accelerator: Accelerator | None, fingerprint: dict[str, Any], problem: str | None) -> None:
    """Hold the fingerprints of all processes against each other.

    Args:
        problem: what this process's look at its files found.

    Raises:
        RequestError: on all of them; one found a problem, or they opened different data, and would train on samples
            twice or never.
    """
    here = [(json.dumps(fingerprint, sort_keys=True, default=str), problem)]
    everywhere = here if accelerator is None else gather_object(here)
    for _, found in everywhere:
        if found is not None:
            raise RequestError(found)
    if len({text for text, _ in everywhere}) > 1:
        fields = [json.loads(text) for text, _ in everywhere]
        differing = sorted(key for key in fingerprint if any(other[key] != fields[0][key] for other in fields))
        raise RequestError(
            f"The processes opened different data ({', '.join(differing)} differ): their configs, or their copies of a "
            f"root, are not the same. Give each machine the same."
        )
