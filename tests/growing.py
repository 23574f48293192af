"""Roots with some tars temporarily removed, for tests of growing roots."""

import shutil
from collections.abc import Iterable
from pathlib import Path


def set_aside(root: Path, tars: Iterable[str]) -> None:
    """Remove the receipts of some tars from a root, and everything published."""
    for tar in tars:
        for receipt in list(root.glob(f"commits/*/{tar}.json")):
            aside = root.with_name("aside") / receipt.parent.name
            aside.mkdir(parents=True, exist_ok=True)
            receipt.rename(aside / receipt.name)
    shutil.rmtree(root / "index")
    for index in root.glob("*/index.json"):
        index.unlink()


def put_back(root: Path, tars: Iterable[str]) -> None:
    """Restore the receipts."""
    for tar in tars:
        for receipt in list(root.with_name("aside").glob(f"*/{tar}.json")):
            receipt.rename(root / "commits" / receipt.parent.name / receipt.name)
