"""The model to sample, provided as a diffusers pipeline folder that all workers can read.

A run's checkpoint is exported, as by `python -m train export`, before the first image is drawn. The run is not
read afterwards, so the trainer may prune the checkpoint. Existing exports and pipelines from the hub are used in place.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import train.export
from evaluation.parts import read_sealed
from shards.base.durable import canonical_json, sealed_json, sha256_file
from shards.base.errors import Outage, RequestError, WorkError, is_storage_error
from shards.base.scratch import private_folder
from shards.base.stop import exiting_on_stop_signal
from shards.base.store import Store, absolute_place, parse_place, resolved_place
from shards.format.models import model_folder
from shards.open import open_store

INDEX = "model_index.json"
"""File that names the class and components of a diffusers pipeline."""
EXPORTED = "model"
"""Folder in the output for a run's exported model."""
RECORD = "model.json"
"""Record of the model whose images are in the output."""
STATE = "state.json"
"""File that marks a checkpoint as complete, because the trainer writes it last."""
HUB_FILES = (INDEX, "*/*.json", "*/*.safetensors", "*/*.txt", "*/*.model", "*.py", "*/*.py")
CLASS = "_class_name"
HASHED_SUFFIXES = (".json", ".safetensors", ".txt", ".model")
OWN_CODE = Path(train.export.__file__).with_name("trimmed_pipeline.py")
"""File that `train export` copies into the pipeline if the network was trained on trimmed captions."""
Weights = Literal["auto", "raw", "ema"]


@dataclass(frozen=True)
class Model:
    """A pipeline, identified by its content."""

    name: str
    """Name given by the user: a run, a folder, or a name on the Hub."""
    step: int | None
    """Step of the run's checkpoint. None for other pipelines."""
    weights: Weights
    content: str
    """SHA-256 of the pipeline's content."""


def is_run(name: str) -> bool:
    """Return whether `name` is a run: a folder with a config.yaml, or any URL."""
    place = parse_place(name)
    return isinstance(place, str) or (place / "config.yaml").is_file()


def checkpoints_in(names: Iterable[str]) -> dict[int, list[str]]:
    """Find the complete checkpoints, which have a STATE file, among the names of the files below checkpoints/.

    Returns:
        Step → the checkpoint's files. In an object store, each launch of a run uploads to separate folders, such as
        `step-00001000.0004/`; if several launches wrote the same step, the newest launch's checkpoint is used.
    """
    found: dict[tuple[int, int], list[str]] = {}
    for name in names:
        if match := re.match(r"step-(\d{8,})(?:\.(\d{4,}))?/", name):
            found.setdefault((int(match[1]), int(match[2] or 0)), []).append(name)
    complete = {key: files for key, files in found.items() if any(name.partition("/")[2] == STATE for name in files)}
    return {step: complete[step, launch] for step, launch in sorted(complete)}


def choose_step(run: Store, step: int | None) -> int:
    """Return `step` after checking that it has a checkpoint. If `step` is None, return the newest checkpoint's step.

    Raises:
        RequestError: the checkpoint does not exist.
    """
    steps = sorted(checkpoints_in(run.files("checkpoints")))
    if not steps:
        raise RequestError(
            f"{run.where()} has no complete checkpoint yet. Run the command again once a checkpoint is saved."
        )
    if step is not None and step not in steps:
        raise RequestError(
            f"{run.where()} has no checkpoint at step {step}. Available steps: {', '.join(map(str, steps))}."
        )
    return step if step is not None else steps[-1]


def prepare_model(
    name: str, step: int | None, weights: Weights, output: Store, trust_remote_code: bool = False
) -> Model:
    """Make a model available to all workers: export a run's checkpoint to `output`, or check an existing pipeline.

    Raises:
        RequestError: the model does not exist, its folder contains untrusted code, or `output` contains samples from
            a different model.
        WorkError: the checkpoint is damaged, or was removed while it was being read.
        Outage: storage failed during the export.
        SystemExit: a stop signal arrived during the export.
    """
    found = Model(**record) if (record := read_sealed(output, RECORD)) else None
    place = parse_place(name)
    name = str(absolute_place(place) if isinstance(place, Path) and place.is_dir() else place)
    if not is_run(name):
        check_code(folder := pipeline_folder(name), trust_remote_code)
        model = Model(name, None, weights, hash_pipeline(folder))
    elif found is not None and is_exported(output) and _is_same_run(found, name):
        # the checkpoint may have been pruned after its export, so only the export is read
        model = replace(found, name=name, step=found.step if step is None else step, weights=weights)
    else:
        run = open_store(name)
        if step is None and found is not None and found.step in checkpoints_in(run.files("checkpoints")):
            step = found.step
        model = _export(name, choose_step(run, step), weights, output, found)
    if found is None:
        output.write(RECORD, sealed_json(asdict(model)))
    elif found.step is not None and found == replace(model, name=found.name):
        return found  # the same checkpoint, but the run was moved or is given by a different path
    elif found != model:
        checkpoint = "" if found.step is None else f"step {found.step}, {found.weights} weights, "
        raise RequestError(
            f"{output.where()} contains samples from a different model ({found.name}, {checkpoint}content hash "
            f"{found.content[:12]}…). Set --output to a different location, or use that model."
        )
    return model


def _is_same_run(found: Model, name: str) -> bool:
    """Return whether `name` is the run of `found`, or may be it after a move: the old location no longer contains a
    run, and the checkpoint has been pruned, so it cannot be compared."""
    if resolved_place(found.name) == resolved_place(name):
        return True
    here = checkpoints_in(open_store(name).files("checkpoints"))
    return found.step is not None and found.step not in here and open_store(found.name).size("config.yaml") is None


def _export(name: str, step: int, weights: Weights, output: Store, found: Model | None) -> Model:
    """Export a checkpoint, and store it in `output` unless `found` is a different model."""
    from train.export.pipeline import ExportConfig, write_pipeline  # imports diffusers, which takes seconds

    stopped = f"A stop signal ended the export of step {step} in {name}. Run the same command again to continue."
    with private_folder() as scratch, exiting_on_stop_signal(stopped):
        target = scratch / EXPORTED
        try:
            write_pipeline(parse_place(name), ExportConfig(step=step, weights=weights, output=target))
        except Outage:
            raise
        except (RequestError, WorkError, OSError) as error:
            if is_storage_error(error):
                raise Outage(
                    f"The checkpoint at step {step} in {name} could not be exported: {error}. Fix the storage and run "
                    f"the same command again."
                ) from error
            reason = f"{str(error).removesuffix('.')}."
            raise WorkError(
                f"The checkpoint at step {step} in {name} cannot be exported, so it cannot be sampled: {reason} Other "
                f"checkpoints may be intact."
            ) from error
        model = Model(name, step, weights, hash_pipeline(target))
        if found is not None and found != replace(model, name=found.name):
            return model
        files = [path for path in sorted(target.rglob("*")) if path.is_file()]
        files.sort(key=lambda path: path.name == INDEX)  # the index comes last, because it marks the export as complete
        output.put({f"{EXPORTED}/{path.relative_to(target).as_posix()}": path for path in files})
    return model


def is_exported(output: Store) -> bool:
    """Return whether `output` contains a complete export of a run's checkpoint."""
    return output.size(f"{EXPORTED}/{INDEX}") is not None and output.size(RECORD) is not None


def drop_export(output: Store) -> None:
    """Delete an exported model after all its images have been drawn. The model's record is kept."""
    output.remove([f"{EXPORTED}/{name}" for name in output.files(EXPORTED)])


@contextmanager
def open_pipeline(model: Model, output: Store) -> Iterator[Path]:
    """Yield the pipeline's folder on this machine, after checking its content.

    Raises:
        WorkError: the model's files are missing on this machine, differ from `model.content`, or are being deleted.
    """
    with nullcontext(pipeline_folder(model.name)) if model.step is None else output.local(EXPORTED) as folder:
        try:
            is_intact = (folder / INDEX).is_file() and hash_pipeline(folder) == model.content
        except OSError as error:
            if is_storage_error(error):
                raise
            is_intact = False  # another process is deleting the files
        if not is_intact:
            deleted = (
                "A watcher deletes an exported model after an evaluation; in that case, run the same command again to "
                "export the checkpoint again. Otherwise, put"
            )
            raise WorkError(
                f"{folder} on this machine does not contain the model to sample (content hash {model.content[:12]}…). "
                f"{'Put' if model.step is None else deleted} the model on shared storage, or copy the same files to "
                f"this path on every node."
            )
        yield folder


def pipeline_folder(name: str) -> Path:
    """Return the folder of a pipeline, given its path or its name on the Hub."""
    folder = model_folder(name, HUB_FILES)
    if not (folder / INDEX).is_file():
        raise RequestError(
            f"{name} is neither a run folder (it has no config.yaml) nor a diffusers pipeline (it has no {INDEX}). "
            f"Set --model to a run (a folder or URL), the folder of an exported pipeline, or the name of a pipeline on "
            f"the hub."
        )
    return folder


def hash_pipeline(folder: Path) -> str:
    """Return the SHA-256 of a pipeline's content.

    The hash covers the index (including the pipeline's class, but not the diffusers version and path recorded in it),
    every component's files, and all code that loading the pipeline executes.
    """
    written = json.loads((folder / INDEX).read_text())
    index = {key: value for key, value in written.items() if key == CLASS or not key.startswith("_")}
    digest = hashlib.sha256(canonical_json(index))
    files = [path for path in folder.glob("*/*") if path.suffix in HASHED_SUFFIXES and path.parent.name in index]
    for path in sorted([*files, *code_files(folder)]):
        digest.update(f"{path.relative_to(folder).as_posix()} {sha256_file(path)}\n".encode())
    return digest.hexdigest()


def code_files(folder: Path) -> list[Path]:
    """List the files that diffusers executes to load the pipeline, and all Python files that they may import.

    model_index.json determines the files. If `_class_name` is [module, class], the pipeline's class is defined in
    module.py. If a component is [module, class] and its folder contains module.py, the component's class is defined
    there. Python files in other folders are never executed.
    """
    index = json.loads((folder / INDEX).read_text())
    found = list(folder.glob("*.py")) if isinstance(index.get("_class_name"), list) else []
    for name, value in index.items():
        if isinstance(value, list) and not name.startswith("_") and (folder / name / f"{value[0]}.py").is_file():
            found += folder.joinpath(name).glob("*.py")
    return sorted(found)


def check_code(folder: Path, allowed: bool) -> None:
    """Check that the pipeline contains no code except the file that `train export` writes, unless code is `allowed`.

    Raises:
        RequestError: loading the pipeline would execute other code, and `allowed` is false.
    """
    files = code_files(folder)
    if allowed or not files:
        return
    if len(files) > 1 or files[0].parent != folder or sha256_file(files[0]) != sha256_file(OWN_CODE):
        names = ", ".join(path.relative_to(folder).as_posix() for path in files)
        raise RequestError(
            f"The pipeline in {folder} contains Python code ({names}), which every worker would execute. Read the "
            f"code, and if you trust it, add --trust_remote_code true."
        )
