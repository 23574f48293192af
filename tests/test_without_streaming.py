"""streaming is optional: neither stage, nor any check of a root, imports it. The GPU check needs no Ray, either."""

import sys
from importlib import import_module
from pathlib import Path

import yaml

from tests.fixtures import precompute_config
from tests.forks import OK, fork, import_again, wait_for
from tests.rooms import modules


def test_neither_the_modules_nor_stage_1_import_it(models: Path, tars: Path, tmp_path: Path) -> None:
    """Import all modules again, and run stage 1; tests/train/test_run.py does the same for stage 2."""
    ours = [name for name in modules() if name.split(".")[0] in ("cluster", "plan", "precompute", "shards", "train")]
    ours.remove("shards.dataset")  # a subclass of streaming's dataset, if streaming is installed
    assert len(ours) > 100
    stage_1 = tmp_path / "precompute.yaml"
    ray = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "ray"}
    assert ray
    config = precompute_config(models, tars, tmp_path / "latents", buckets=["64x64"])
    stage_1.write_text(yaml.safe_dump(config.model_dump(mode="json")))

    def import_and_run() -> None:
        import_again("streaming", "ray")
        import_module("bench.gpu_check.__main__")
        sys.modules.update(ray)
        for name in ours:
            import_module(name)
        encode_all, load_config, verify_root, open_store = (
            getattr(import_module(module), name)
            for module, name in (
                ("tests.fixtures", "encode_all"),
                ("shards.base.config", "load_config"),
                ("shards.tools.verify", "verify_root"),
                ("shards.open", "open_store"),
            )
        )
        read = load_config(import_module("precompute.config").PrecomputeConfig, stage_1, [], "precompute")
        encode_all(read)
        assert list(verify_root(open_store(read.output))) == []

    assert wait_for(fork(import_and_run)) == OK
