"""Roots that hold less for a while, for tests of what happens when something is added."""

import shutil
from collections.abc import Iterable
from pathlib import Path


def set_aside(root: Path, tars: Iterable[str]) -> None:
    """Take the receipts of some tars out of a root, and all that was published."""
    for tar in tars:
        for receipt in list(root.glob(f"commits/*/{tar}.json")):
            aside = root.with_name("aside") / receipt.parent.name
            aside.mkdir(parents=True, exist_ok=True)
            receipt.rename(aside / receipt.name)
    shutil.rmtree(root / "index")
    for index in root.glob("*/index.json"):
        index.unlink()


def put_back(root: Path, tars: Iterable[str]) -> None:
    """Commit them again."""
    for tar in tars:
        for receipt in list(root.with_name("aside").glob(f"*/{tar}.json")):
            receipt.rename(root / "commits" / receipt.parent.name / receipt.name)
