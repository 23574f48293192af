"""Projections of text latents, compared with NumPy's SVD of the states."""

import math
from typing import NoReturn

import numpy as np
import pytest
import torch

from bench.kit.roots import encoding_record
from shards.base.errors import RequestError
from shards.format.projection import (
    CALIBRATION_CAPTIONS,
    EMPTY_FRACTION,
    ProjectionBuilder,
    TowerGroup,
    groups_of,
    inherited_widths,
    matrix_of,
    project,
    project_texts,
)
from shards.format.text import TextLatents
from shards.format.towers import TextTower

WIDTH, LENGTH = 24, 6
ONE: TowerGroup = (("text",),)
THREE: TowerGroup = (("a", "b"), ("c",))


def tower(width: int = WIDTH, **fields: object) -> TextTower:
    return encoding_record(LENGTH, width, **fields).texts["text"]


def captions(names: dict[str, int], count: int, seed: int = 0) -> list[dict[str, TextLatents]]:
    """Make uncentred states with a decaying spectrum."""
    rng = np.random.default_rng(seed)
    made: list[dict[str, TextLatents]] = []
    for _ in range(count):
        number = int(rng.integers(1, LENGTH + 1))
        made.append({})
        for name, width in names.items():
            states = rng.standard_normal((LENGTH, width)) * np.geomspace(4, 0.01, width) + np.linspace(0, 1, width)
            made[-1][name] = TextLatents(torch.tensor(states).half().float(), number)
    return made


def stacked(found: list[dict[str, TextLatents]], name: str, trim: bool = False) -> np.ndarray:
    kept = []
    for latents in (caption[name] for caption in found):
        assert latents.states is not None
        kept.append(latents.states[: latents.num_tokens if trim else None])
    return torch.cat(kept).double().numpy()


def compute(texts: dict[str, TextTower], group: TowerGroup, width: int, found: list[dict[str, TextLatents]]) -> dict:
    builder = ProjectionBuilder(texts, {group: width})
    for first in range(0, len(found), 100):
        some = found[first : first + 100]
        builder.add([f"{first + i}" for i in range(len(some))], some)
    return builder.finish(found[0])


@pytest.mark.parametrize("fields", [{}, {"trim": True}, {"masked": True}])
def test_the_columns_are_the_leading_singular_vectors_of_the_states(fields: dict[str, bool]) -> None:
    """Padding that the network does not read is left out, even if it is stored."""
    found = captions({"text": WIDTH}, 300)
    made = compute({"text": tower(**fields)}, ONE, 8, found)["text"]
    states = stacked(found + [found[0]] * 30, "text", bool(fields))  # the empty caption counts as a tenth of the others
    _, singular, vectors = np.linalg.svd(states)
    expected = vectors[:8].T
    signs = np.sign((made.array.astype(np.float64) * expected).sum(axis=0))
    np.testing.assert_allclose(made.array, expected * signs, atol=2e-3)
    np.testing.assert_allclose(made.energy_shares, (singular**2 / (singular**2).sum())[:8], atol=1e-8)
    largest = np.take_along_axis(made.array, np.abs(made.array).argmax(axis=0)[None], 0)
    assert (largest > 0).all()
    assert (made.calibration_captions, made.input_width, made.joint) == (330, WIDTH, ())
    assert made.energy_kept == pytest.approx(sum(made.energy_shares))


def test_the_same_captions_give_the_same_bytes() -> None:
    found = captions({"text": WIDTH}, 250)
    assert compute({"text": tower()}, ONE, 12, found) == compute({"text": tower()}, ONE, 12, found)


def test_the_first_columns_are_the_narrower_projection() -> None:
    found = captions({"text": WIDTH}, 250)
    wide, narrow = (compute({"text": tower()}, ONE, width, found)["text"] for width in (12, 5))
    assert wide.first(5) == narrow


def test_captions_with_states_that_are_not_finite_are_left_out() -> None:
    found = captions({"text": WIDTH}, 50)
    broken = TextLatents(torch.full((LENGTH, WIDTH), torch.inf), 3)
    with_broken = compute({"text": tower()}, ONE, 5, [*found, {"text": broken}])["text"]
    assert with_broken.matrix == compute({"text": tower()}, ONE, 5, found)["text"].matrix


def test_projecting_rounds_to_float16_and_sums_in_float64() -> None:
    rng = np.random.default_rng(3)
    states = torch.tensor(rng.standard_normal((2, 5, WIDTH)) * 1000).float()
    projection = compute({"text": tower()}, ONE, 7, captions({"text": WIDTH}, 50))["text"]
    expected = states.half().double().numpy() @ projection.array.astype(np.float64)
    found = project(states, matrix_of(projection))
    assert found.dtype == torch.float32 and found.shape == (2, 5, 7)
    np.testing.assert_array_equal(found.numpy(), expected.astype(np.float16))


def test_a_joint_projection_is_that_of_the_concatenated_towers() -> None:
    """As in SD3: two towers concatenated along the width, zero-padded to the width of a third."""
    widths = {"a": 4, "b": 6, "c": 16}
    found = captions(widths, 200)
    made = compute({name: tower(width) for name, width in widths.items()}, THREE, 9, found)
    states = [stacked(found + [found[0]] * 20, name) for name in widths]
    first = np.pad(np.concatenate(states[:2], axis=1), [(0, 0), (0, 6)])
    # each inner list has the same weight
    total = first.T @ first / (first**2).sum() + states[2].T @ states[2] / (states[2] ** 2).sum()
    values, vectors = np.linalg.eigh(total / 2)
    expected = vectors[:, ::-1][:, :9]
    matrix = made["c"].array.astype(np.float64)
    signs = np.sign((matrix * expected).sum(axis=0))
    np.testing.assert_allclose(matrix, expected * signs, atol=2e-3)
    np.testing.assert_array_equal(np.concatenate([made["a"].array, made["b"].array]), made["c"].array[:10])
    assert all(projection.joint == THREE for projection in made.values())
    np.testing.assert_allclose(made["a"].energy_shares, values[::-1][:9], atol=1e-8)


def test_captions_that_span_too_few_dimensions_are_refused() -> None:
    found = captions({"text": WIDTH}, 2)
    with pytest.raises(RequestError, match=r"onto 14 dimensions, because .* span only 12\. Set `text\.width` to at"):
        compute({"text": tower()}, ONE, 14, found)
    with pytest.raises(RequestError, match=r"needs captions to compute the projection, but none were found"):
        ProjectionBuilder({"text": tower()}, {ONE: 3}).finish(found[0])


@pytest.mark.parametrize(
    ("widths", "joint", "message"),
    [
        ({"text": 24}, (), r"`text\.width` 24 saves nothing, because no .* more dimensions \(text 24\)"),
        ({"text": 0}, (), r"must be at least 1, but is 0"),
        ({"txt": 4}, (), r"stored for text, wide, long, but not for txt\."),
        ({"pooled": 4}, (), r"but not for pooled\."),
        ({"text": 4}, (("text",), ("wide",)), r"lists text and wide, which are projected with one matrix"),
        ({"text": 4, "wide": 4}, (("text", "text"), ("wide",)), r"List each tower once"),
        ({"text": 4, "long": 4}, (("text", "long"),), r"concatenates text and long along the width, but they differ"),
    ],
)
def test_invalid_requests_are_refused(widths: dict[str, int], joint: TowerGroup, message: str) -> None:
    long = encoding_record(2 * LENGTH, WIDTH).texts["text"]
    texts = {"text": tower(), "wide": tower(40), "pooled": tower(states=False, pooled=8), "long": long}
    with pytest.raises(RequestError, match=message):
        groups_of(texts, widths, joint)


def test_towers_are_projected_in_groups() -> None:
    texts = {"text": tower(), "wide": tower(40), "other": tower()}
    assert groups_of(texts, {"text": 4, "wide": 5}) == {ONE: 4, (("wide",),): 5}
    assert groups_of(texts, {"text": 30, "wide": 30}) == {(("wide",),): 30}  # text has only 24 dimensions
    both: TowerGroup = (("text",), ("wide",))
    assert groups_of(texts, {"text": 30, "wide": 30, "other": 3}, both) == {both: 30, (("other",),): 3}
    assert groups_of(texts, {"other": 3}, both) == {(("other",),): 3}
    assert groups_of(texts, {}, (("clip",), ("absent",))) == {}  # a config may name towers that it does not use


def no_computation(*_: object) -> NoReturn:
    raise AssertionError("a projection was computed")


def project_three(stored: dict[str, TextTower], group: TowerGroup, texts: dict[str, TextTower]) -> dict[str, TextTower]:
    """Use the projection of a root."""
    return project_texts(texts, {group: 5}, None, ("ROOT", stored), None, no_computation)


def test_a_root_with_only_some_of_the_towers_keeps_its_joint_projection() -> None:
    widths = {"a": 4, "b": 6, "c": 16}
    texts = {name: tower(width) for name, width in widths.items()}
    made = compute(texts, THREE, 9, captions(widths, 200))
    stored = {name: text.with_projection(made[name]) for name, text in texts.items()}
    whole = project_three(stored, THREE, texts)
    assert all(whole[name].projection == made[name].first(5) for name in widths)
    only_c = {"c": stored["c"]}
    assert project_three(only_c, (("c",),), {"c": texts["c"]})["c"] == whole["c"]
    assert inherited_widths({"c": texts["c"]}, stored, "ROOT") == ({"c": 9}, (("c",),))
    with pytest.raises(RequestError, match=r"ROOT projects c, but a and b and c need a joint projection"):
        project_three(only_c, THREE, texts)
    with pytest.raises(RequestError, match=r"c with `text\.joint: \[\['a', 'b'\], \['c'\]\]`, but \[\] is"):
        project_three(stored, (("c",),), texts)
    with pytest.raises(RequestError, match=r"ROOT does not project a and b and c"):
        project_three(texts, THREE, texts)
    with pytest.raises(RequestError, match=r"ROOT does not project any of a, b, c"):
        inherited_widths(texts, texts, "ROOT")
    different = {"c": texts["c"].model_copy(update={"layer": -2})}
    with pytest.raises(RequestError, match=r"was computed for a different encoder or layer"):
        project_three(only_c, (("c",),), different)


def test_the_number_of_calibration_captions_is_limited() -> None:
    builder = ProjectionBuilder({"text": tower()}, {ONE: 3})
    group = captions({"text": WIDTH}, 8)
    assert not builder.is_full
    builder.add([str(i) for i in range(CALIBRATION_CAPTIONS)], group * (CALIBRATION_CAPTIONS // 8))
    assert builder.is_full
    copies = math.ceil(EMPTY_FRACTION * CALIBRATION_CAPTIONS)
    assert builder.finish(group[0])["text"].calibration_captions == CALIBRATION_CAPTIONS + copies
