"""Shared fixtures and helpers: small models, tars, and a latents root made from them once per session."""

import json
import logging
import os
import pickle
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import fsspec
import hypothesis
import pytest
import torch
import torch._functorch.config
from accelerate.state import AcceleratorState
from botocore.loaders import JSONFileLoader
from moto.server import ThreadedMotoServer

import precompute.describe
import train.export.pipeline
from cluster.fleet import Done
from precompute.config import PrecomputeConfig, describe_encoding, make_recipe
from precompute.encode.recipe import Decode
from precompute.encode.tar import encode_tar
from precompute.encode.towers import Towers
from precompute.encode.worker import Networks, _kept_networks, load_networks
from precompute.input.find import find_input
from precompute.job.projection import resolve_projections
from precompute.pixels.decode import decode as decode_picture
from shards.base.durable import locked
from shards.format.encoding import EncodingRecord
from shards.format.models import ProbedAutoencoder, probe_autoencoder
from shards.open import open_store
from shards.root.index import write_indexes
from shards.root.shared import create_root, record_rules
from tests.graphs import Graphs, capture_graphs
from tests.once import made_once, shared_folder
from tests.tiny import make_models, make_samples, make_tar
from train.run.reporting import log
from train.run.reporting.plot import plot_run

# no test fails because a machine is slow
hypothesis.settings.register_profile("any speed", deadline=None)
hypothesis.settings.load_profile("any speed")

Record = Callable[[str, object], None]
"""Type of pytest's `record_property`. What a test records is printed when it ends."""

# let S3 clients share the files that botocore reads; otherwise, each client would parse megabytes of JSON
read_json = cache(JSONFileLoader().load_file)
JSONFileLoader.load_file = lambda loader, path: read_json(path)


@cache
def probed(class_name: str, config_json: str) -> ProbedAutoencoder:
    """Probe an autoencoder once per process and config, because building it takes most of the time of
    `describe_encoding`. Nothing changes the network, of which only the config is read."""
    return probe_autoencoder(class_name, json.loads(config_json))


for module in (precompute.describe, train.export.pipeline):
    module.probe_autoencoder = lambda name, config: probed(name, json.dumps(config))  # type: ignore[attr-defined]


def plot_empty(run_dir: Path) -> Path:
    """Plot a run, but write an empty file, because rendering takes as long as a short run."""
    from matplotlib.figure import Figure

    with patch.object(Figure, "savefig", lambda figure, path: path.write_bytes(b"")):
        return plot_run(run_dir)


log.plot_run = plot_empty  # also in the processes that tests.ranks forks


@pytest.fixture(scope="session")
def shared_counts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the planner's counts of FLOPs in a folder that all processes of this run of pytest share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(shared_folder(tmp_path_factory) / "cache"))
        yield


@pytest.fixture(scope="module", autouse=True)
def _precision_of_its_own() -> Iterator[None]:
    """Reset accelerate's precision, which it otherwise keeps for the whole process."""
    yield
    AcceleratorState._reset_state()


SIZES = [(80, 64), (200, 150), (140, 300), (40, 90)]


def as_in_a_fresh_process() -> None:
    """Undo the process-wide settings that training changes."""
    torch.backends.cuda.enable_flash_sdp(True)
    torch._functorch.config.activation_memory_budget = 1.0
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_traces_of_other_tests() -> Iterator[None]:
    yield
    as_in_a_fresh_process()


@pytest.fixture(scope="module", autouse=True)
def _networks_of_its_own() -> Iterator[None]:
    """Free the networks that `make_towers` and `ray_replaced` keep."""
    yield
    _kept.cache_clear()
    _kept_networks.cache_clear()


@pytest.fixture(autouse=True)
def _no_traces_of_streaming(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Release StreamingDataset's shared memory after each test, and let only one process at a time look for a free
    name.

    streaming releases it only when the process exits, and each new dataset opens the memory of all others: a process
    with a hundred datasets had 16,000 open files. If two processes find the same name free, both take it, and one
    fails.
    """
    if "streaming" not in sys.modules:  # it may not exist
        yield
        return
    held: list[Callable[[], None]] = []
    monkeypatch.setattr("streaming.base.shared.memory.atexit", SimpleNamespace(register=held.append))
    name_of = sys.modules["streaming.base.dataset"].get_shm_prefix

    def alone(*arguments: object) -> object:
        with locked(Path(tempfile.gettempdir()) / f"latentmill-{os.getuid()}.streaming.lock"):
            return name_of(*arguments)

    monkeypatch.setattr("streaming.base.dataset.get_shm_prefix", alone)
    yield
    for let_go in held:
        let_go()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small VAE, text encoder and tokenizer. Tests must not modify it."""
    return made_once(tmp_path_factory, "models", make_models)


@pytest.fixture(scope="session")
def towers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of small text and vision models. Tests must not modify it."""
    from tests.tiny_towers import make_towers as save_towers  # which imports this module

    return save_towers(tmp_path_factory.mktemp("towers"))


def make_tars(folder: Path) -> None:
    """Write two tars, each with 20 intact samples and 3 bad ones."""
    for shard in range(2):
        samples = make_samples(shard, 20, SIZES)
        samples.append((f"{shard:05d}9000", {"txt": b"no picture"}))
        samples.append((f"{shard:05d}9001", {"jpg": b"<html>", "txt": b"not a picture"}))
        samples.append((f"{shard:05d}9002", {"jpg": samples[0][1]["jpg"]}))
        make_tar(folder, f"{shard:05d}", samples)


@pytest.fixture(scope="session")
def tars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tars of `make_tars`. Tests must not modify it."""
    return made_once(tmp_path_factory, "tars", make_tars)


def clip_tower(models: Path) -> dict[str, str]:
    """The text encoder of `make_models`, as a field of `texts`."""
    return {
        "model": str(models / "text_encoder"),
        "tokenizer": str(models / "tokenizer"),
        "class_name": "CLIPTextModel",
    }


def precompute_config(models: Path, tars: Path, output: Path | str, **changes: Any) -> PrecomputeConfig:
    """Make a stage 1 config for the CPU: float32, stored without rounding, buckets 64x64 and 128x128."""
    fields = {
        "input": str(tars),
        "output": output,
        "buckets": ["64x64", "128x128"],
        "vae": str(models / "vae"),
        "texts": {"text": clip_tower(models)},
        "captions": ["txt"],
        "precision": "float32",
        "workers": {"num_gpus": 0, "num_cpus": 1, "decode_threads": 2, "batch_size": 8},
    }
    exact = {name: {"storage": "float16"} | changes.pop(name, {}) for name in ("image", "text")}
    return PrecomputeConfig.model_validate(fields | exact | changes)


def folder_of(config: PrecomputeConfig) -> Path:
    """Return the latents root of a config whose `output` is a folder."""
    assert isinstance(config.output, Path)
    return config.output


@lru_cache(maxsize=4)
def _kept(encoding_json: bytes) -> Networks:
    """Load the networks of an encoding, and keep them for the module's other tests, as a worker does for its job."""
    return load_networks(EncodingRecord.parse(encoding_json, "the encoding record"), "cpu", False, False)


def make_towers(config: PrecomputeConfig, encoding: EncodingRecord | None = None) -> Towers:
    """Build the towers of a config on the CPU."""
    encoding, one_by_one = encoding or describe_encoding(config), config.workers.one_by_one
    image, texts, features = load_networks(encoding, "cpu", False, True) if one_by_one else _kept(encoding.sealed())
    sizes = config.workers.batch_size, make_recipe(config, encoding).batch_sizes
    # tests may replace entries of these dictionaries, but not those of the kept ones
    return Towers(dict(texts), *sizes, one_by_one, image=image, features=dict(features))


def encode_all(
    config: PrecomputeConfig,
    attempt: int = 1,
    decode: Decode = decode_picture,
    report: Callable[[int], None] = lambda samples_in: None,
) -> None:
    """Run stage 1 in this process, without Ray."""
    as_in_a_fresh_process()
    store = open_store(config.output)
    encoding = resolve_projections(config, describe_encoding(config), find_input(config.input), ())
    create_root(store, encoding)
    record_rules(store, config.to_fill.rules)
    recipe = replace(make_recipe(config, encoding), decode=decode)
    towers = make_towers(config, encoding)
    for unit in find_input(config.input).units(store):
        encode_tar(unit, recipe, store, towers, attempt, report)
    write_indexes(store)


class InlineFleet:
    """Replacement for the fleet that runs every unit in this process, without Ray. Units are pickled, as by Ray."""

    def __init__(self, config: object, function: Callable[..., Any], units: Iterable[tuple[str, Any]], at_once: int):
        self.function, self.units = function, units

    def __iter__(self) -> Iterator[Done[Any]]:
        for key, work in self.units:
            yield Done(key, None, self.function(pickle.loads(pickle.dumps(work)), 1, lambda done: None))


@contextmanager
def ray_replaced() -> Iterator[None]:
    """Let `python -m precompute` encode in this process."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("precompute.__main__", "precompute.job.projection"):
            patch.setattr(f"{module}.start_ray", lambda workers: None)
        for module in ("precompute.job.run", "precompute.job.projection"):
            patch.setattr(f"{module}.Fleet", InlineFleet)
        for name in ("prepare_process", "scratch_of_process"):
            patch.setattr(f"precompute.encode.worker.{name}", lambda *_: None)
        yield


@pytest.fixture
def without_ray() -> Iterator[None]:
    """Let `python -m precompute` encode in this process. Fixtures of wider scope use `ray_replaced` itself."""
    with ray_replaced():
        yield


@pytest.fixture
def in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `derive` and `download` work in threads, because new processes would import everything again."""
    monkeypatch.setattr("shards.base.pool.start_pool", lambda most, *_: ThreadPoolExecutor(most))


@pytest.fixture(scope="session")
def latents(tmp_path_factory: pytest.TempPathFactory, models: Path, tars: Path) -> Path:
    """A latents root of both tars: 30 samples in 64x64, 20 in 128x128. Tests must not modify it."""

    def make(folder: Path) -> None:
        encode_all(precompute_config(models, tars, folder / "latents"))

    return made_once(tmp_path_factory, "roots", make) / "latents"


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """Address of an S3 server, which takes as long to start and stop as a short test."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line per request takes a third of the server's time
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


def s3_variables(server: str) -> dict[str, str]:
    """Return the environment variables with which clients use an S3 server of the tests."""
    keys = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION")
    return {"AWS_ENDPOINT_URL": server, **dict.fromkeys(keys, "us-east-1")}


@pytest.fixture
def s3(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Address of an empty bucket on an S3 server. Child processes can reach it, too."""
    for name, value in s3_variables(s3_server).items():
        monkeypatch.setenv(name, value)
    clients = fsspec.get_filesystem_class("s3")
    clients.clear_instance_cache()  # from servers of other tests
    bucket = f"bucket-{uuid.uuid4().hex[:12]}"  # tests share the server
    clients().makedirs(bucket)
    yield f"s3://{bucket}"
    clients.clear_instance_cache()


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Graphs]:
    """The graphs that are compiled during the test."""
    with capture_graphs(monkeypatch) as captured:
        yield captured
