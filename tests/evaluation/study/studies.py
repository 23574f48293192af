"""Studies for tests: sample sets of synthetic images, and votes on them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from evaluation.parts import PartReceipt, commit_part
from evaluation.sampling.job import SamplePart, begin_set, write_picture
from evaluation.sampling.model import Model
from evaluation.sampling.prompts import Prompt, prompts_sha256
from evaluation.sampling.sets import PICTURES, file_name
from evaluation.sampling.settings import Drawing, SamplingConfig, Setting
from evaluation.study.prepare import prepare
from evaluation.study.protocol import ProtocolConfig, Study, read_study
from evaluation.study.schedule import Showing, make_schedule
from evaluation.study.votes import Vote
from shards.open import open_store

CATEGORIES = ("colours", "counting")
PROMPTS = [Prompt(f"p{i}", f"picture {i} <b>&amp; of {i} blobs", CATEGORIES[i % 2]) for i in range(8)]


def make_set(place: Path, model: int, prompts: list[Prompt] = PROMPTS, **changes: Any) -> Path:
    """Make a sample set whose images encode their model in the red value of the first pixel. Return its folder."""
    config = SamplingConfig.model_validate({"size": "64x48", "part_size": 5, "seed": 3} | changes)
    count = len(prompts) * config.images_per_prompt
    setting, sha256, per_prompt = Setting(8.0, 50, "own"), prompts_sha256(prompts), config.images_per_prompt
    drawing = Drawing(sha256, config.seed, per_prompt, count, config.size, setting, "s", None, None, "float32", "png")
    width, height = map(int, config.size.split("x"))

    def draw(part: SamplePart) -> Callable[[Path], PartReceipt]:
        def make(folder: Path) -> PartReceipt:
            for sample in part.samples:
                pixels = np.random.default_rng([model, sample.number]).integers(0, 255, (height, width, 3), np.uint8)
                pixels[0, 0] = (model, sample.number, 0)
                write_picture(folder / file_name(sample.number, "png"), pixels, "png")
            return {"samples": [[sample.prompt.id, sample.index] for sample in part.samples]}

        return make

    for _, part in begin_set(place, drawing, Model(f"model {model}", None, "auto", str(model)), prompts, config):
        commit_part(open_store(place), PICTURES, part.name, draw(part))
    return place


def make_study(folder: Path, num_models: int = 2, **protocol: Any) -> Study:
    """Prepare a study from new sample sets, with 8 prompts and 3 raters who see all items."""
    sets = [make_set(folder / f"set-{model}", model) for model in range(num_models)]
    (folder / "study").mkdir(exist_ok=True)
    (folder / "study" / "secret").write_bytes(b"always the same for tests, 32 by")
    fields = {"raters": 3, "votes_per_item": 3, "repeats": 0.25, "gold": {"share": 0.25}} | protocol
    prepare(sets, ProtocolConfig.model_validate(fields), folder / "study")
    return read_study(folder / "study")


def maker(study: Study, name: str) -> int:
    """Return the model that an image of `make_set` encodes."""
    with Image.open(study.folder / "pictures" / name) as picture:
        return int(np.asarray(picture)[0, 0, 0])


def votes_of(study: Study, score: Callable[[int, Showing, str], float]) -> list[Vote]:
    """Return all votes of a study, given the score of the item's first image: 1, 0, or 0.5 for a tie."""
    words = {1.0: "first", 0.0: "second", 0.5: "tie"}
    votes = []
    for rater, showings in enumerate(make_schedule(study)):
        for showing in showings:
            for question in study.protocol.config.questions:
                worth = score(rater, showing, question)
                votes.append(Vote(rater, showing.number, question, words[1 - worth if showing.swapped else worth], 2.5))
    return votes


def random_score(seed: int, share: float = 0.5) -> Callable[[int, Showing, str], float]:
    """Make random scores that are consistent for repeats and correct for gold items."""

    def score(rater: int, showing: Showing, question: str) -> float:
        if showing.kind == "gold":
            return 1.0
        words = [seed, rater, *map(ord, showing.item.id + question)]
        return float(np.random.default_rng(words).choice([0.0, 0.5, 1.0], p=[0.8 - share, 0.2, share]))

    return score
