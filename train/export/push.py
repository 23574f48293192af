"""Upload an exported pipeline to the Hugging Face Hub, with its model card.

examples:
  python -m train push runs/phase2/export org/name --license cc-by-4.0
"""

import argparse
import re
from pathlib import Path

from shards.base.errors import RequestError
from shards.tools.push import push_folder

LICENSE = re.compile(r"^\*\*License:\*\* to be filled in.*?(?=\n\n)", re.MULTILINE | re.DOTALL)
FOLDER = re.compile(r"^folder = .*$", re.MULTILINE)
"""Passages of the model card that depend on where it is published."""


def push(arguments: list[str]) -> str:
    """Run `train push`: upload a pipeline folder, and return the address of its repository.

    Raises:
        RequestError: the folder is not an exported pipeline, there is no licence, or the hub refuses access.
        WorkError: the upload was interrupted.
    """
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="train push", description=__doc__, formatter_class=raw)
    parser.add_argument("folder", type=Path, help="pipeline folder that `train export` wrote")
    parser.add_argument("repo", help="repository on the Hugging Face Hub: org/name")
    parser.add_argument("--license", help="identifier of the licence on the Hub, such as cc-by-4.0; required")
    parser.add_argument("--public", action="store_true", help="make a new repository visible to everyone")
    options = parser.parse_args(arguments)
    text = LICENSE.sub(f"**License:** {options.license}", read_card(options.folder))
    text = FOLDER.sub(f'folder = "{options.repo}"', text)
    return push_folder(options.folder, options.repo, "model", text, options.license, options.public)


def read_card(folder: Path) -> str:
    """Return the model card of an exported pipeline. Raises RequestError if there is none."""
    card = folder / "README.md"
    if not (folder / "model_index.json").is_file() or not card.is_file():
        raise RequestError(
            f"{folder} is not a pipeline folder with a model card. Write one with `python -m train export RUN`."
        )
    return card.read_text()
