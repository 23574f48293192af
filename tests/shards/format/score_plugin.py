"""A program that adds a score from outside the package, and then runs stage 1 and the trainer's filter with it.

`python -m tests.shards.format.score_plugin MODELS TARS ROOT OLD_ROOT` encodes TARS to ROOT and prints a JSON object.
"""

# ruff: noqa: E402
import json
import sys
from pathlib import Path

from shards.format.scores import SCORES, Score

SCORES.append(Score("hps", "Human preference score", aliases=("hps_v2",)))

from precompute.select.metadata import OUTPUT_SCHEMA, find_columns
from shards.base.config import load_config
from shards.base.errors import RequestError
from tests.conftest import encode_all, precompute_config
from train.data.spec import DataConfig
from train.data.streams import open_data

OPTIONS = ["--bucket", "64x64", "--num_workers", "0", "--filter.hps.min", "0.5"]


def run(models: Path, tars: Path, root: Path, old_root: Path) -> None:
    """Encode `tars` to `root`, and filter by the new score there and in a root that does not have it."""
    encode_all(precompute_config(models, tars, root), models)
    spec = open_data(load_config(DataConfig, None, ["--root", str(root), *OPTIONS], "train"), 1)
    try:
        open_data(load_config(DataConfig, None, ["--root", str(old_root), *OPTIONS], "train"), 1)
        refusal = ""
    except RequestError as error:
        refusal = str(error)
    found = {
        "passing": spec.streams[0].num_samples,
        "refusal": refusal,
        "selected_from": find_columns(OUTPUT_SCHEMA, "metadata")["hps"],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    run(*map(Path, sys.argv[1:]))
