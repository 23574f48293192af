from pathlib import Path

import yaml

from bench.loader import run_fields
from shards.base.config import load_config
from train.config import TrainConfig


def test_the_config_of_its_run_is_valid(tmp_path: Path) -> None:
    fields = run_fields(tmp_path / "root", tmp_path / "run")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(fields))
    assert load_config(TrainConfig, tmp_path / "config.yaml", [], "train").max_steps == fields["max_steps"]
