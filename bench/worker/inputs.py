"""Tars of synthetic images in img2dataset's format."""

import io
import json
import tarfile
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from examples.shapes.world import encode_picture, plan_world


class Captioned(NamedTuple):
    """An encoded image and its caption."""

    data: bytes
    suffix: str
    caption: str | None


def jpegs(pictures: Sequence[bytes], number: int) -> list[Captioned]:
    """Repeat JPEGs up to `number`, with long captions."""
    caption = "picture {} of nothing in particular, in many colours and at several scales"
    return [Captioned(data, "jpg", caption.format(i)) for i, data in enumerate(islice(cycle(pictures), number))]


def demo_pictures(number: int) -> list[Captioned]:
    """Draw the demo's images that its server has: JPEG, PNG and WebP of 64 to 320 px, some of them broken."""
    found = []
    for index, picture in enumerate(plan_world(number, seed=0)):
        if picture.kind != "missing":
            data = encode_picture(picture, np.random.default_rng([0, index, 1]))
            found.append(Captioned(data, picture.path.rpartition(".")[2], picture.caption))
    return found


def make_tars(folder: Path, pictures: Sequence[Captioned], per_tar: int) -> None:
    """Write tars, each with a file that states its number of samples."""
    folder.mkdir(parents=True, exist_ok=True)
    for shard, first in enumerate(range(0, len(pictures), per_tar)):
        samples = pictures[first : first + per_tar]
        with tarfile.open(folder / f"{shard:05d}.tar", "w") as tar:
            for i, (data, suffix, caption) in enumerate(samples):
                key = f"{shard:05d}{i:04d}"
                metadata = {"key": key, "url": f"http://example.org/{key}", "caption": caption, "punsafe": 0.01}
                members = {suffix: data, "json": json.dumps(metadata).encode()}
                for name, content in (members | ({"txt": caption.encode()} if caption else {})).items():
                    member = tarfile.TarInfo(f"{key}.{name}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
        counts = {"count": len(samples), "successes": len(samples)}
        (folder / f"{shard:05d}_stats.json").write_text(json.dumps(counts))
