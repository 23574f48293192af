"""Fixture with the small families, each made once for all tests of this folder."""

import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import diffusers.pipelines.prx.pipeline_prx as with_ftfy
import pytest

from tests.families.small import FAMILIES, Small, make_small
from tests.once import made_once


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Small]:
    """Family name → this process's copy of the small family, into which tests may write runs and derived roots."""

    @cache
    def copy(name: str) -> Small:
        family = FAMILIES[name]
        made = made_once(tmp_path_factory, name, lambda folder: make_small(family, folder))
        return Small(family, Path(shutil.copytree(made, tmp_path_factory.mktemp(name) / name)))

    return copy


@pytest.fixture(autouse=True, scope="session")
def _texts_need_no_mending() -> Iterator[None]:
    """Replace ftfy, which PRXPipeline calls on prompts: it leaves plain ASCII unchanged and is not installed."""

    class Unneeded:
        @staticmethod
        def fix_text(text: str) -> str:
            assert text.isascii()
            return text

    had = hasattr(with_ftfy, "ftfy")
    if not had:
        with_ftfy.ftfy = Unneeded
    yield
    if not had:
        del with_ftfy.ftfy
