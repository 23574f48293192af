"""Run folders with evaluations for tests, and a parser of the report."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

from evaluation.__main__ import run as command
from evaluation.parts import commit_part
from shards.base.durable import sealed_json
from shards.open import open_store

PROMPTS = [{"id": f"p{i}", "text": f"a <b>shape</b> & {i}", "category": None} for i in range(3)]
VOID = {"meta", "img", "link", "br", "input"}


class Page(HTMLParser):
    """Parser that lists a page's elements and fails on unbalanced tags."""

    def __init__(self, path: Path):
        super().__init__()
        self.source = path.read_text()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(self.source)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def make_run(folder: Path, steps: int = 40, **config: Any) -> Path:
    """Make a run folder whose log has a line every ten steps, at 20 images/s on two processes."""
    folder.mkdir(parents=True)
    fields = {"max_steps": 100, "global_batch_size": 8, "init_from": None, **config}
    fields["data"] = {"streams": [{"root": "absent/root", "bucket": "64x64"}]}
    (folder / "config.yaml").write_text(yaml.safe_dump(fields))
    line = {"images_per_second": 20.0, "images_per_second_per_gpu": 10.0, "mfu": 0.25}
    line |= {"data_wait": 0.0, "memory_gb": 1.0}
    rows = [{"step": step, "loss": 1 / step, **line} for step in range(10, steps + 1, 10)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def add_evaluation(run: Path, step: int, number: str, value: float, weights: str = "auto") -> None:
    """Add a sample set with one metric to a run."""
    place = run / "evaluations" / f"step-{step:08d}-{weights}" / "g8-s1-own"
    row = {"metric": "kid", "value": value, "low": value - 1, "high": value + 1, "estimand": "distance", "n": 3}
    row |= {"reference_n": 9, "id": number, "better": "lower", "model": str(run), "step": step, "weights": weights}
    store = open_store(place)
    store.create(f"metrics/kid-{number}.json", sealed_json(row | {"setting": {}}))
    drawing = {"images_per_prompt": 1, "codec": "png"}
    store.create("sampling.json", sealed_json({"drawing": drawing, "part_size": 2, "prompts": PROMPTS}))
    for part, numbers in (("00000", (0, 1)), ("00001", (2,))):

        def make(folder: Path, numbers: tuple[int, ...] = numbers) -> dict[str, Any]:
            for i in numbers:
                Image.new("RGB", (64, 32), (step % 256, 40 * i, 7)).save(folder / f"{i:07d}.png")
            return {"samples": [[f"p{i}", 0] for i in numbers]}

        commit_part(store, "pictures", part, make)


def report(*words: Any) -> Page:
    """Run the report command, and parse its page."""
    command(["report", *map(str, words)])
    return Page(Path(words[words.index("--output") + 1]))
