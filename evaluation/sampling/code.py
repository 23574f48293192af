"""Python code in a model's folder: which files loading the pipeline would execute, and whether that is allowed."""

import importlib.util
import json
from pathlib import Path

from shards.base.durable import sha256_file
from shards.base.errors import RequestError
from shards.format.models import PIPELINE_INDEX

OWN = "train.export.trimmed_pipeline"
"""Module that `train export` copies into the pipeline if the network was trained on trimmed captions."""


def code_files(folder: Path) -> list[Path]:
    """List the files that diffusers executes to load the pipeline, and all Python files that they may import.

    model_index.json names them. If `_class_name` is [module, class], the pipeline's class is defined in module.py. If a
    component is [module, class] and its folder contains module.py, the component's class is defined there. Python files
    in other folders are never executed.
    """
    index = json.loads((folder / PIPELINE_INDEX).read_text())
    found = list(folder.glob("*.py")) if isinstance(index.get("_class_name"), list) else []
    for name, value in index.items():
        if isinstance(value, list) and not name.startswith("_") and (folder / name / f"{value[0]}.py").is_file():
            found += folder.joinpath(name).glob("*.py")
    return sorted(found)


def has_foreign_code(folder: Path) -> bool:
    """Return whether loading the pipeline would execute code other than the file that `train export` writes."""
    spec = importlib.util.find_spec(OWN)
    assert spec is not None and spec.origin is not None
    files = code_files(folder)
    if not files:
        return False
    return len(files) > 1 or files[0].parent != folder or sha256_file(files[0]) != sha256_file(Path(spec.origin))


def check_code(folder: Path, allowed: bool) -> None:
    """Check that the pipeline contains no foreign code, unless the user allowed it.

    Raises:
        RequestError: it contains such code, and `trust_remote_code` is not set.
    """
    if not allowed and has_foreign_code(folder):
        names = ", ".join(path.relative_to(folder).as_posix() for path in code_files(folder))
        raise RequestError(
            f"The pipeline in {folder} contains Python code ({names}), which every worker would execute. Read the "
            f"code, and if you trust it, add --trust_remote_code true."
        )
