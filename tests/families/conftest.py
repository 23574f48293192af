"""Fixture with the small families, each made once for all tests of this folder."""

from collections.abc import Callable, Iterator

import diffusers.pipelines.prx.pipeline_prx as with_ftfy
import pytest

from tests.families.small import FAMILIES, Small, make_small


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Small]:
    """Family name → small family, made on first use."""
    made: dict[str, Small] = {}

    def make(name: str) -> Small:
        if name not in made:
            made[name] = make_small(FAMILIES[name], tmp_path_factory.mktemp(name))
        return made[name]

    return make


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
