"""The config of a training run, as its last launch recorded it in the run's folder."""

from typing import Any

import yaml

from shards.base.errors import RequestError
from shards.base.store import Store

REQUIRED = ("max_steps", "global_batch_size", "data")
"""Fields that every run's config.yaml has, and that the config.yaml of another program lacks."""


def run_config(run: Store) -> dict[str, Any]:
    """Read a run's resolved training config.

    Raises:
        RequestError: the folder has no config.yaml, or it cannot be parsed.
    """
    try:
        config: dict[str, Any] = yaml.safe_load(run.read("config.yaml"))
    except FileNotFoundError:
        raise RequestError(
            f"{run.where()} is not a training run: it has no config.yaml. Pass the run_dir of a training run (a "
            f"folder or URL)."
        ) from None
    except yaml.YAMLError as error:
        raise RequestError(
            f"{run.where('config.yaml')} cannot be parsed as YAML: {error}. Restore it from a backup."
        ) from error
    missing = [name for name in REQUIRED if not isinstance(config, dict) or name not in config]
    if missing:
        raise RequestError(
            f"{run.where('config.yaml')} is not a training run's config: it has no {', '.join(missing)}. Pass the "
            f"run_dir of a training run. If this is one, restore the file from a backup."
        )
    return config
