"""What the loss curve is a function of: a checkpoint goes on only under the same, and all processes see the same."""

import json
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object
from diffusers import UNet2DConditionModel

from shards.base.errors import RequestError
from train.data import order
from train.data.spec import DataConfig, DataSpec
from train.objective.paths import ObjectiveConfig


def make_fingerprint(
    seed: int,
    global_batch_size: int,
    data: DataConfig,
    spec: DataSpec,
    objective: ObjectiveConfig,
    unet: UNet2DConditionModel,
) -> dict[str, Any]:
    """All of it; it is stored in every checkpoint."""
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
            }
            for stream in spec.streams
        ],
        "objective": objective.model_dump(mode="json"),
        "unet": {key: value for key, value in sorted(unet.config.items()) if not key.startswith("_")},
    }


def check_resume(folder: Path, saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse to continue a checkpoint under another data order or objective.

    Raises:
        RequestError: the entries that differ.
    """
    now = json.loads(json.dumps(now))  # as the saved one was: tuples are lists
    different = [f"{key}: {saved.get(key)} ≠ {now.get(key)}" for key in now if saved.get(key) != now.get(key)]
    if different:
        raise RequestError(
            f"{folder} was trained under other settings: {'; '.join(different)} (checkpoint ≠ this run). Set them "
            f"back, or give another run_dir (and init_from, to start from these weights)."
        )


def check_same_everywhere(accelerator: Accelerator | None, fingerprint: dict[str, Any]) -> None:
    """Hold the fingerprints of all processes against each other.

    Raises:
        RequestError: on all of them; they opened different data, and would train on samples twice or never.
    """
    if accelerator is None:
        return
    everywhere = gather_object([json.dumps(fingerprint, sort_keys=True, default=str)])
    if len(set(everywhere)) > 1:
        fields = [json.loads(text) for text in everywhere]
        differing = sorted(key for key in fingerprint if any(other[key] != fields[0][key] for other in fields))
        raise RequestError(
            f"The processes opened different data ({', '.join(differing)} differ): an index.json was written while "
            f"they started, or their copies of a root are not the same. Start again once nothing writes to the roots."
        )
