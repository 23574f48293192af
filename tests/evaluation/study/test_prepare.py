"""Preparation of a study from sample sets, and the raters' schedule."""

import hashlib
import io
import json
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from evaluation.study.prepare import prepare
from evaluation.study.protocol import ProtocolConfig, Study, check_pictures, make_secret, read_study
from evaluation.study.schedule import Showing, assign_raters, make_schedule
from shards.base.config import load_config
from shards.base.durable import DamagedFile, read_sealed_json, write_sealed_json
from shards.base.errors import RequestError, WorkError
from shards.base.store import Place
from tests.evaluation.sets import draw_here, pictures, sampling
from tests.evaluation.study.studies import PROMPTS, make_set, make_study, maker


def config(**changes: object) -> ProtocolConfig:
    return ProtocolConfig.model_validate({"raters": 3, "votes_per_item": 2} | changes)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """A study with the default protocol. Tests must not modify it."""
    return make_study(tmp_path_factory.mktemp("default"))


# --- the folder ---


def test_pictures_are_copied_without_metadata_under_anonymous_names(study: Study, tmp_path: Path) -> None:
    names = {path.name for path in (study.folder / "pictures").iterdir()}
    items = study.protocol.items
    assert len(items) == len(PROMPTS)
    for item in items:
        assert item.models == (0, 1) and [maker(study, name) for name in item.pictures] == [0, 1]
        for name in item.pictures:
            data = (study.folder / "pictures" / name).read_bytes()
            assert hashlib.sha256(data).hexdigest()[:8] not in name  # they are linked only by the secret
            with Image.open(study.folder / "pictures" / name) as picture:
                assert picture.info == {} and picture.size == (64, 48)
            assert {data[i + 4 : i + 8] for i in chunks(data)} == {b"IHDR", b"IDAT", b"IEND"}
    assert names == {name for item in [*items, *study.protocol.gold] for name in item.pictures}
    made = tmp_path / "other"
    assert len(make_secret(made)) == 32 and make_secret(made) == make_secret(made) != make_secret(tmp_path / "third")
    assert oct((made / "secret").stat().st_mode & 0o777) == "0o600"
    check_pictures(study)


def chunks(png: bytes) -> list[int]:
    """Return the offset of each chunk of a PNG."""
    found, at = [], 8
    while at < len(png):
        found.append(at)
        at += 12 + int.from_bytes(png[at : at + 4], "big")
    return found


def test_prepare_completes_a_study_and_rejects_a_changed_protocol(tmp_path: Path) -> None:
    study = make_study(tmp_path)
    lost = study.folder / "pictures" / study.protocol.items[0].pictures[0]
    before = (study.folder / "protocol.json").read_bytes()
    lost.write_bytes(b"half")
    with pytest.raises(WorkError, match=r"is damaged\. Restore it from a backup, or run the same `prepare` command"):
        check_pictures(study)
    lost.unlink()
    with pytest.raises(WorkError, match="is missing"):
        check_pictures(study)
    make_study(tmp_path)
    check_pictures(study)
    assert (study.folder / "protocol.json").read_bytes() == before
    with pytest.raises(RequestError, match=r"contains a study with a different protocol\. Changing the protocol"):
        make_study(tmp_path, margin=0.2)
    assert (study.folder / "protocol.json").read_bytes() == before


def test_folders_that_are_not_a_readable_study(tmp_path: Path) -> None:
    def refuse(error: type[Exception], message: str, folder: Path = tmp_path / "study") -> None:
        with pytest.raises(error, match=message):
            read_study(folder)

    refuse(RequestError, r"is not a study: it has no protocol\.json", tmp_path)
    study = make_study(tmp_path)
    path = study.folder / "protocol.json"
    content, written = read_sealed_json(path), path.read_text()
    write_sealed_json(path, content | {"version": 1})
    refuse(RequestError, r"protocol\.json has format version 1, but this version of")
    path.write_text(written.replace('"margin": 0.1', '"margin": 0.2'))
    refuse(DamagedFile, "does not match the SHA-256 stored in it")
    path.write_text(written)
    (study.folder / "secret").write_bytes(b"x" * 32)
    refuse(WorkError, "is missing, or is not the secret that the study was prepared with")


def test_pictures_of_sampled_sets_are_copied_exactly(pipeline: Path, tmp_path: Path) -> None:
    """Every pixel is copied from two settings of a model, one of them stored as WebP."""
    settings = (sampling(guidance=[1.0], steps=[1]), sampling(steps=[1], codec="webp"))
    sets = [draw_here(pipeline, tmp_path / str(number), one, PROMPTS[:3]) for number, one in enumerate(settings)]
    protocol = prepare(sets, config(), tmp_path / "study")
    assert len(protocol.items) == 6  # three prompts with two pictures each
    for drawn, side in zip(sets, range(2), strict=True):
        files = [Image.open(io.BytesIO(data)) for _, data in sorted(pictures(drawn).items())]
        for item, file in zip(protocol.items, files, strict=True):
            with Image.open(tmp_path / "study" / "pictures" / item.pictures[side]) as copy:
                assert copy.format == "PNG" and (np.asarray(copy) == np.asarray(file)).all()


# --- sets that cannot be compared ---


def test_sets_that_cannot_be_compared_are_rejected(tmp_path: Path) -> None:
    a, b = make_set(tmp_path / "a", 0), make_set(tmp_path / "b", 1)
    changes: dict[str, dict[str, Any]] = {
        r"differ in seed \(3 and 4\)": {"seed": 4},
        r"differ in images_per_prompt \(1 and 2\), num_samples \(8 and 16\)": {"images_per_prompt": 2},
        r"differ in size \(64x48 and 48x48\)": {"size": "48x48"},
        r"differ in prompts \(": {"prompts": PROMPTS[:7]},
    }
    cases: list[tuple[list[Place], ProtocolConfig, str]] = [
        ([a, make_set(tmp_path / f"other-{number}", 1, **change)], config(), f"cannot be compared: they {message}")
        for number, (message, change) in enumerate(changes.items())
    ]
    cases += [([a], config(), "at least two different sample sets"), ([a, a], config(), "at least two different")]
    cases.append(([a, b], config(votes_per_item=4), r"votes_per_item = 4 exceeds protocol\.raters = 3, but a rater"))
    cases.append(([a, tmp_path / "none"], config(), "is not a sample set"))
    for sets, protocol, message in cases:
        with pytest.raises(RequestError, match=message):
            prepare(sets, protocol, tmp_path / "study")
    assert not (tmp_path / "study").exists()
    next(b.rglob("*.png")).unlink()
    with pytest.raises(WorkError, match=r"\.png is missing"):
        prepare([a, b], config(), tmp_path / "study")
    next(b.glob("receipts/pictures/*")).unlink()
    with pytest.raises(WorkError, match=r"has only \d of 8 images"):
        prepare([a, b], config(), tmp_path / "study")
    assert not (tmp_path / "study" / "protocol.json").exists()


# --- gold items ---


def test_a_study_needs_gold_items(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"`gold.share` = '0': a study without gold items cannot detect raters"):
        load_config(ProtocolConfig, None, ["--gold.share", "0"], "test")
    sets = [make_set(tmp_path / str(model), model, PROMPTS[:1]) for model in range(2)]
    with pytest.raises(RequestError, match="gold items cannot be made, and a study without them cannot detect raters"):
        prepare(sets, config(), tmp_path / "study")


def test_gold_items_pair_a_picture_with_a_pixelated_one_of_another_prompt(study: Study) -> None:
    prompts = {item.prompt_id: item for item in study.protocol.items}
    coarse = {}
    for item in prompts.values():
        for name in item.pictures:
            small = Image.open(study.folder / "pictures" / name).resize((4, 3), Image.Resampling.BOX)  # blocks of 16 px
            coarse[small.resize((64, 48), Image.Resampling.NEAREST).tobytes()] = item.prompt_id
    assert study.protocol.gold
    for gold in study.protocol.gold:
        better, worse = gold.pictures
        assert better in prompts[gold.prompt_id].pictures and gold.models is None
        assert coarse[Image.open(study.folder / "pictures" / worse).tobytes()] != gold.prompt_id
    assert {maker(study, gold.pictures[0]) for gold in study.protocol.gold} == {0, 1}


def test_gold_items_from_a_file(tmp_path: Path) -> None:
    for name, level in (("good", 200), ("bad", 20)):
        about = PngInfo()
        about.add_text("model", "A")
        Image.new("RGB", (64, 48), (level, 0, 0)).save(tmp_path / f"{name}.png", pnginfo=about)
    table = tmp_path / "gold.csv"
    table.write_text("prompt,better,worse\na red picture,good.png,bad.png\n")
    study = make_study(tmp_path, gold={"file": str(table)})
    (gold,) = study.protocol.gold
    assert gold.prompt == "a red picture" and [maker(study, name) for name in gold.pictures] == [200, 20]
    assert all(Image.open(study.folder / "pictures" / name).info == {} for name in gold.pictures)
    png = (tmp_path / "bad.png").read_bytes()
    (tmp_path / "damaged.png").write_bytes(png[:11] + b"\x0c" + png[12:])  # the length of the header
    for text, said in (
        ("prompt,better,worse\nx,good.png,damaged.png\n", r"damaged\.png cannot be decoded as PNG, WebP or JPEG"),
        ("prompt,better,worse\n", "has no row"),
        ("prompt,better\nx,good.png\n", "KeyError: 'worse'"),
        ("prompt,better,worse,question\nx,good.png,bad.png,style\n", "question style, which .* Use quality or align"),
        ("prompt,better,worse\nx,good.png,gone.png\n", "No such file"),
        ("prompt,better,worse\nx,good.png,gold.csv\n", r"gold\.csv cannot be decoded as PNG, WebP or JPEG"),
    ):
        table.write_text(text)
        with pytest.raises(RequestError, match=said):
            make_study(tmp_path / "other", gold={"file": str(table)})


def test_gold_images_are_stored_upright(tmp_path: Path) -> None:
    """Cameras store rotated pixels and an EXIF orientation."""
    upright = Image.new("RGB", (48, 64), (200, 0, 0))
    upright.paste((0, 0, 200), (0, 0, 48, 32))
    exif = Image.Exif()
    exif[0x0112] = 6  # the stored image must be rotated by 90° clockwise
    upright.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "good.png", exif=exif)
    Image.new("RGB", (48, 64)).save(tmp_path / "bad.png")
    table = tmp_path / "gold.csv"
    table.write_text("prompt,better,worse\na blue and red picture,good.png,bad.png\n")
    study = make_study(tmp_path, gold={"file": str(table)})
    (gold,) = study.protocol.gold
    with Image.open(study.folder / "pictures" / gold.pictures[0]) as stored:
        assert np.array_equal(np.asarray(stored), np.asarray(upright)) and not stored.getexif()
    exif[0x011A] = (72, 1)  # the horizontal resolution, whose type becomes text
    damaged = exif.tobytes().replace(b"\x01\x1a\x00\x05", b"\x01\x1a\x00\x02")
    upright.save(tmp_path / "good.png", exif=damaged)
    with pytest.raises(RequestError, match=r"good\.png cannot be decoded as PNG, WebP or JPEG"):
        make_study(tmp_path / "other", gold={"file": str(table)})


def test_a_study_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    sets = [make_set(tmp_path / f"set-{model}", model) for model in range(2)]
    (tmp_path / "file").touch()
    with pytest.raises(RequestError, match=r"study's folder .*file/study cannot be created \(.*file: File exists\)"):
        prepare(sets, config(votes_per_item=3), tmp_path / "file" / "study")


def test_gold_items_suffice_for_several_images_per_prompt(tmp_path: Path) -> None:
    """Each of 3 raters sees all 32 items (8 prompts with 4 images each)."""
    sets = [make_set(tmp_path / str(model), model, images_per_prompt=4) for model in range(2)]
    for share, per_rater, num_gold in ((0.05, 2, 4), (0.25, 8, 8)):  # twice as many, but at most one per prompt
        folder = tmp_path / f"study-{share}"
        prepare(sets, config(votes_per_item=3, gold={"share": share}), folder)
        study = read_study(folder)
        assert len(study.protocol.gold) == num_gold
        for showings in make_schedule(study):
            assert Counter(showing.kind for showing in showings)["gold"] == per_rater


def test_a_study_with_too_few_gold_items_is_rejected(tmp_path: Path) -> None:
    sets = [make_set(tmp_path / str(model), model, images_per_prompt=4) for model in range(2)]
    picture = next((tmp_path / "0").rglob("*.png"))
    (tmp_path / "gold.csv").write_text(f"prompt,better,worse\nx,{picture},{picture}\n")
    for gold, counts in (
        ({"share": 0.3}, r"protocol\.gold\.share = 0\.3 requires 10 gold items per rater, but the study has only 8"),
        ({"file": str(tmp_path / "gold.csv")}, r"requires 2 gold items .* has only 1"),
    ):
        with pytest.raises(RequestError, match=rf"{counts}.*Lower protocol\.gold\.share"):
            prepare(sets, config(votes_per_item=3, gold=gold), tmp_path / "study")
    assert not (tmp_path / "study" / "protocol.json").exists()


# --- the schedule ---


@settings(max_examples=50)
@given(st.integers(1, 60), st.integers(2, 12), st.data())
def test_items_are_assigned_evenly(items: int, raters: int, data: st.DataObject) -> None:
    votes = data.draw(st.integers(1, raters))
    dealt = assign_raters(np.random.default_rng(data.draw(st.integers(0, 99))).random((items, raters)), votes)
    assert all(len(set(row)) == votes for row in dealt)
    loads = np.bincount(dealt.ravel(), minlength=raters)
    assert loads.sum() == items * votes and loads.max() - loads.min() <= 1


def test_raters_are_not_assigned_in_fixed_groups(study: Study) -> None:
    """Otherwise, some raters would never share a prompt, and their effects could not be separated from the prompts'."""
    items = [replace(study.protocol.items[0], id=f"item {number}") for number in range(200)]
    counts = study.protocol.config.model_copy(update={"raters": 15, "votes_per_item": 5})
    many = replace(study, protocol=replace(study.protocol, config=counts, items=items))
    seen: dict[str, list[int]] = defaultdict(list)
    for rater, showings in enumerate(make_schedule(many)):
        for showing in showings:
            if showing.kind == "first":
                seen[showing.item.id].append(rater)
    met = np.zeros((15, 15), dtype=int)
    for raters in seen.values():
        met[np.ix_(raters, raters)] += 1
    assert len(seen) == 200 and met.min() >= 5


def test_showings_of_each_rater(tmp_path: Path) -> None:
    study = make_study(tmp_path, num_models=3, raters=4, votes_per_item=3)
    schedule = make_schedule(study)
    assert schedule == make_schedule(study)  # a restart changes nothing
    seen: Counter[str] = Counter()
    for showings in schedule:
        assert [showing.number for showing in showings] == list(range(1, len(showings) + 1))
        kinds = Counter(showing.kind for showing in showings)
        first = {showing.item.id: showing for showing in showings if showing.kind == "first"}
        seen.update(first.keys())
        assert kinds["first"] == len(first) == 18 and kinds["gold"] == 4 and kinds["repeat"] == 4
        for showing in showings:
            if showing.kind == "repeat":
                before = first[showing.item.id]
                assert before.number < showing.number and before.swapped != showing.swapped
                assert before.pictures == showing.pictures[::-1]
    assert set(seen.values()) == {3} and len(seen) == 24
    orders = {tuple(showing.item.id for showing in showings) for showings in schedule}
    assert len(orders) == 4


def test_sides_are_balanced_and_unpredictable(tmp_path: Path) -> None:
    study = make_study(tmp_path, raters=60, votes_per_item=60)

    def sides(schedule: list[list[Showing]]) -> np.ndarray:
        """Return (raters, items) whether the sides are swapped."""
        ordered = [sorted(showings, key=lambda showing: showing.item.id) for showings in schedule]
        return np.array([[showing.swapped for showing in own if showing.kind == "first"] for own in ordered])

    table = sides(make_schedule(study))
    assert abs(table.mean() - 0.5) < 4 * 0.5 / np.sqrt(table.size)
    assert np.abs(table.mean(0) - 0.5).max() < 4 * 0.5 / np.sqrt(60)
    other = make_schedule(replace(study, secret=b"another secret"))
    assert abs((table == sides(other)).mean() - 0.5) < 4 * 0.5 / np.sqrt(table.size)


def test_the_protocol_records_everything_that_is_fixed(study: Study) -> None:
    content = json.loads((study.folder / "protocol.json").read_text())
    assert content["config"].keys() == ProtocolConfig.model_fields.keys()
    assert content["config"]["gold"] == {"share": 0.25, "exclude_below": 0.75}
    assert content["models"][1]["name"] == "model 1" and content["models"][1]["guidance"] == 8.0
    assert study.secret.hex() not in json.dumps(content)
    assert content["sha256"] != study.protocol.sha256  # the hash covers the whole file
    assert hashlib.sha256((study.folder / "protocol.json").read_bytes()).hexdigest() == study.protocol.sha256
