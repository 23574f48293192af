"""The model that is sampled, made ready as a diffusers pipeline folder that every worker sees.

A run's checkpoint is exported by `python -m train export`, whole, before the first picture: nothing is read from the
run afterwards, so that the trainer may drop the checkpoint. Exports and hub pipelines are used where they are.
"""

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from evaluation.parts import read_sealed
from evaluation.sampling.code import check_code, code_files
from shards.base.durable import canonical_json, sealed_json, sha256_file
from shards.base.errors import RequestError, WorkError
from shards.base.store import Store
from shards.format.models import PIPELINE_INDEX as INDEX
from shards.format.models import model_folder
from shards.open import open_store

EXPORTED, RECORD, STATE = "model", "model.json", "state.json"
HUB_FILES = (INDEX, "*/*.json", "*/*.safetensors", "*/*.txt", "*/*.model", "*.py", "*/*.py")
CLASS = "_class_name"
CONTENT = (".json", ".safetensors", ".txt", ".model")
Weights = Literal["auto", "raw", "ema"]


@dataclass(frozen=True)
class Model:
    """A pipeline, by content."""

    name: str
    """As it was asked for: a run, a folder, a name on the hub."""
    step: int | None
    """Of a run's checkpoint."""
    weights: Weights
    content: str
    """SHA-256 of the pipeline."""


def is_run(name: str) -> bool:
    """Whether `name` is a run folder, by its config.yaml; at an address, nothing else is looked for."""
    return "://" in name or (Path(name) / "config.yaml").is_file()


def checkpoints_in(names: Iterable[str]) -> dict[int, list[str]]:
    """Find the checkpoints among the names of files below checkpoints/: those with STATE, which is written last.

    Returns:
        Step → the checkpoint's files. At an object-store address each launch of a run uploads to folders of its own,
        `step-00001000.0004/`; of several of one step, the newest launch's counts.
    """
    found: dict[tuple[int, int], list[str]] = {}
    for name in names:
        if match := re.match(r"step-(\d{8,})(?:\.(\d{4,}))?/", name):
            found.setdefault((int(match[1]), int(match[2] or 0)), []).append(name)
    whole = {key: files for key, files in found.items() if any(name.partition("/")[2] == STATE for name in files)}
    return {step: whole[step, launch] for step, launch in sorted(whole)}


def chosen_step(run: Store, step: int | None) -> int:
    """The checkpoint that was asked for, or the newest.

    Raises:
        RequestError: there is none.
    """
    steps = sorted(checkpoints_in(run.files("checkpoints")))
    if not steps or (step is not None and step not in steps):
        there = f"It has {', '.join(map(str, steps))}" if steps else "It has no complete checkpoint yet"
        raise RequestError(f"{run.where()} has no checkpoint{f' of step {step}' if step is not None else ''}. {there}.")
    return step if step is not None else steps[-1]


def make_ready(name: str, step: int | None, weights: Weights, output: Store, trust_remote_code: bool = False) -> Model:
    """The model, once every worker can open it: by its name, or, of a run, in `output`.

    Raises:
        RequestError: there is no such model, its folder has code that is not trusted, or `output` was begun with
            another.
        WorkError: the checkpoint is damaged, or vanished while it was read.
    """
    found = Model(**record) if (record := read_sealed(output, RECORD)) else None
    name = str(Path(name).absolute()) if Path(name).is_dir() else name
    if not is_run(name):
        check_code(folder := pipeline_folder(name), trust_remote_code)
        model = Model(name, None, weights, hash_pipeline(folder))
    elif found is not None and is_exported(output):
        # it was exported, and the run may have dropped the checkpoint since
        model = replace(found, name=name, step=found.step if step is None else step, weights=weights)
    else:
        model = _export(name, chosen_step(open_store(name), step), weights, output)
    if found is None:
        output.write(RECORD, sealed_json(asdict(model)))
    elif found.step is not None and found == replace(model, name=found.name):
        return found  # the run lies elsewhere now, or is called otherwise
    elif found != model:
        raise RequestError(
            f"{output.where()} holds samples of another model ({found.name}, step {found.step}, {found.weights}, "
            f"{found.content[:12]}…). Give another --output, or the model that it was begun with."
        )
    return model


def _export(name: str, step: int, weights: Weights, output: Store) -> Model:
    with tempfile.TemporaryDirectory(prefix="latentmill-") as scratch:
        target = Path(scratch) / EXPORTED
        words = ["export", name, "--step", str(step), "--weights", weights, "--output", str(target)]
        result = subprocess.run([sys.executable, "-m", "train", *words], capture_output=True, text=True)
        if result.returncode:
            said = " ".join(result.stderr.split()).rpartition("error: ")[2]
            raise WorkError(f"Step {step} of {name} cannot be sampled: {said} The other checkpoints may be sound.")
        content = hash_pipeline(target)
        files = [path for path in sorted(target.rglob("*")) if path.is_file()]
        files.sort(key=lambda path: path.name == INDEX)  # last: who finds it finds all
        output.put({f"{EXPORTED}/{path.relative_to(target).as_posix()}": path for path in files})
    return Model(name, step, weights, content)


def is_exported(output: Store) -> bool:
    """Whether a run's model is there to be sampled."""
    return output.size(f"{EXPORTED}/{INDEX}") is not None and output.size(RECORD) is not None


def drop_export(output: Store) -> None:
    """Remove a run's exported model, of which all pictures are drawn; what it was stays on record."""
    output.remove([f"{EXPORTED}/{name}" for name in output.files(EXPORTED)])


@contextmanager
def opened(model: Model, output: Store) -> Iterator[Path]:
    """The pipeline's folder on this machine.

    Raises:
        WorkError: this machine has another one under that name.
    """
    if model.step is not None:
        with output.local(EXPORTED) as folder:
            yield _checked(folder, model)
    else:
        yield _checked(pipeline_folder(model.name), model)


def _checked(folder: Path, model: Model) -> Path:
    if not (folder / INDEX).is_file() or hash_pipeline(folder) != model.content:
        raise WorkError(
            f"{folder} does not hold the model that was to be sampled ({model.content[:12]}…): all nodes must see it, "
            f"or the same one under this name."
        )
    return folder


def pipeline_folder(name: str) -> Path:
    """The folder of a pipeline by path or hub name.

    Raises:
        RequestError: there is none.
    """
    folder = model_folder(name, HUB_FILES)
    if not (folder / INDEX).is_file():
        raise RequestError(
            f"{name} is neither a run folder (it has no config.yaml) nor a diffusers pipeline (it has no {INDEX})."
        )
    return folder


def hash_pipeline(folder: Path) -> str:
    """Hash a pipeline's content (SHA-256): the index with the pipeline's class, but without the version and the path
    that wrote it; every component's files; and all code that loading it executes."""
    written = json.loads((folder / INDEX).read_text())
    index = {key: value for key, value in written.items() if key == CLASS or not key.startswith("_")}
    digest = hashlib.sha256(canonical_json(index))
    files = [path for path in folder.glob("*/*") if path.suffix in CONTENT and path.parent.name in index]
    for path in sorted([*files, *code_files(folder)]):
        digest.update(f"{path.relative_to(folder).as_posix()} {sha256_file(path)}\n".encode())
    return digest.hexdigest()
