"""Stage 1 and the family's diffusers pipeline give each tower the same text."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import DDPMScheduler

from shards.format.encoding import EncodingRecord
from shards.open import open_store
from tests.families.online import EMBEDS
from tests.families.small import FAMILIES, Small
from train.model.network import build_network

CAPTIONS = ["A RED Barn", "Two dogs, and a CAT", "10 Blobs of CLAY"]


class Listening:
    """A tokenizer that records the texts it is called with."""

    def __init__(self, tokenizer: Any):
        self.tokenizer, self.heard = tokenizer, set[str]()

    def __call__(self, texts: str | list[str], *arguments: Any, **options: Any) -> Any:
        self.heard |= {texts} if isinstance(texts, str) else set(texts)
        return self.tokenizer(texts, *arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)


@pytest.mark.parametrize("name", FAMILIES)
def test_towers_get_the_text_that_the_pipeline_gives_them(name: str, small: Callable[[str], Small]) -> None:
    """The pipeline uses its defaults. Case matters, because most tokenizers map it to different tokens."""
    made = small(name)
    pipeline = made.pipeline(build_network(made.folder / "backbone.json", 0), DDPMScheduler())
    names = sorted(component for component in pipeline.components if component.startswith("tokenizer"))
    listening = [Listening(getattr(pipeline, component)) for component in names]
    for component, tokenizer in zip(names, listening, strict=True):
        setattr(pipeline, component, tokenizer)
    backbone = made.family.read("phase1.yaml").get("backbone", {})
    shipped, draws = backbone.get("pipeline", {}), 3 if backbone.get("drop") == "apart" else 1
    EMBEDS[name](pipeline, CAPTIONS, torch.zeros(len(CAPTIONS), draws, dtype=torch.bool))
    texts = EncodingRecord.load(open_store(made.root)).texts
    assert len(names) == len(texts)
    for tower, tokenizer in zip(shipped.get("towers", list(texts)), listening, strict=True):
        assert {texts[tower].prompt(caption) for caption in CAPTIONS} <= tokenizer.heard, tower
