"""The demo's world: deterministic, with true captions, and without the held-out combinations."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from examples.shapes.adherence import prompt_lists
from examples.shapes.captions import FACTS, SYNONYMS, TEMPLATES, fill, stated_facts
from examples.shapes.judge import judge
from examples.shapes.scenes import HELD_OUT, SEEN, sample_scene
from examples.shapes.world import KINDS, PlannedPicture, encode_picture, metadata, plan_world, write_world

BAD_KINDS = ("truncated", "html", "empty", "tiny", "captionless", "missing")


@pytest.fixture(scope="module")
def pictures() -> list[PlannedPicture]:
    return plan_world(2000, seed=0)


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second = (write_world(tmp_path / name, num_pictures=40, seed=3) for name in ("first", "second"))
    assert first == second
    files = sorted(path.relative_to(tmp_path / "first") for path in (tmp_path / "first").rglob("*.*"))
    assert len(files) == 40 - 1  # one picture is missing
    for file in files:
        assert (tmp_path / "first" / file).read_bytes() == (tmp_path / "second" / file).read_bytes()
    assert plan_world(40, seed=4) != first


def test_every_kind_has_its_share(pictures: list[PlannedPicture]) -> None:
    for kind, fraction in KINDS.items():
        assert sum(picture.kind == kind for picture in pictures) == max(1, round(fraction * len(pictures)))


def test_a_world_too_small_for_every_kind_is_rejected() -> None:
    with pytest.raises(
        ValueError, match=r"num_pictures is 5, which is too few for one image of each kind\. Use at least 11"
    ):
        plan_world(5, seed=0)


def test_held_out_combinations_never_occur(pictures: list[PlannedPicture]) -> None:
    assert len(SEEN) == 26
    assert not HELD_OUT & {(picture.scene.colour, picture.scene.shape) for picture in pictures}
    for picture in pictures:
        words = set((picture.caption or "").replace(",", "").split())
        for colour, shape in HELD_OUT:
            assert not (words & _words(colour) and words & _words(shape)), picture


def test_captions_state_only_facts_of_their_scene() -> None:
    rng = np.random.default_rng(0)
    for template in TEMPLATES:
        scene = sample_scene(rng)
        caption = f" {fill(template, scene, rng).replace(',', '')} "
        assert {"colour", "shape"} <= stated_facts(template)
        for fact in FACTS:
            is_stated = any(f" {words} " in caption for words in SYNONYMS.get(getattr(scene, fact), ()))
            is_stated = is_stated or f" {getattr(scene, fact)} " in caption
            assert is_stated or fact not in stated_facts(template)
        assert " a orange" not in caption and not caption.startswith(" a upper")


def test_the_center_of_every_usable_image_matches_its_caption(pictures: list[PlannedPicture]) -> None:
    """Decode like a careful reader: apply EXIF, blend transparency with white, use the first frame, center crop."""
    unusual = [picture for picture in pictures if picture.kind not in ("plain", *BAD_KINDS)]
    plain = [picture for picture in pictures if picture.kind == "plain"][:60]
    for index, picture in enumerate(unusual + plain):
        image: Image.Image = Image.open(io.BytesIO(encode_picture(picture, np.random.default_rng(index))))
        image = ImageOps.exif_transpose(image).convert("RGBA")
        assert image.size == (picture.width, picture.height)
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
        seen = judge(np.asarray(ImageOps.fit(image, (64, 64), Image.Resampling.BICUBIC)))
        assert (seen.colour, seen.shape) == (picture.scene.colour, picture.scene.shape), picture


def test_unusable_images_are_unusable(pictures: list[PlannedPicture]) -> None:
    for kind in ("truncated", "html", "empty"):
        for picture in pictures:
            if picture.kind == kind:
                with pytest.raises(OSError):
                    Image.open(io.BytesIO(encode_picture(picture, np.random.default_rng(0)))).load()
    assert all(min(p.width, p.height) < 64 for p in pictures if p.kind == "tiny")
    assert all(not p.caption for p in pictures if p.kind == "captionless")


def test_most_images_fit_both_buckets_and_some_only_the_smaller(pictures: list[PlannedPicture]) -> None:
    shortest = np.array([min(p.width, p.height) for p in pictures if p.kind == "plain"])
    assert shortest.min() >= 64
    assert 0.8 < (shortest >= 128).mean() < 0.95


def test_the_table_has_laions_columns(pictures: list[PlannedPicture]) -> None:
    table = metadata(pictures, "http://127.0.0.1:1")
    assert table.column_names == [
        *("URL", "TEXT", "WIDTH", "HEIGHT", "similarity", "hash", "punsafe", "pwatermark", "aesthetic"),
    ]
    assert table["URL"][0].as_py() == f"http://127.0.0.1:1/{pictures[0].path}"
    assert table["TEXT"].null_count > 0


def test_prompts_are_fixed_and_match_their_scenes() -> None:
    seen, held_out = prompt_lists().values()
    assert seen == prompt_lists()["seen"] and len(seen) >= 64
    assert {(p.scene.colour, p.scene.shape) for p in seen} == set(SEEN)
    assert {(p.scene.colour, p.scene.shape) for p in held_out} == HELD_OUT
    for prompt in seen + held_out:
        words = set(prompt.text.replace(",", "").split())
        assert words & _words(prompt.scene.colour) and words & _words(prompt.scene.shape)


def _words(name: str) -> set[str]:
    return {name, *SYNONYMS.get(name, ())}
