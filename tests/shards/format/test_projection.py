"""Projections of text latents, compared with NumPy's SVD of the states."""

import numpy as np
import pytest
import torch

from bench.kit.roots import encoding_record
from shards.base.errors import RequestError
from shards.format.projection import EMPTY_SHARE, SAMPLE_SIZE, Learner, Rows, groups_of, matrix_of, project
from shards.format.text import TextLatents
from shards.format.towers import TextTower

WIDTH, LENGTH = 24, 6


def tower(width: int = WIDTH, **fields: object) -> TextTower:
    return encoding_record(LENGTH, width, **fields).texts["text"]


def captions(names: dict[str, int], count: int, seed: int = 0) -> list[dict[str, TextLatents]]:
    """Make states whose directions differ in energy, and which are not centred."""
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
    kept = [caption[name].states[: caption[name].num_tokens if trim else None] for caption in found]
    return torch.cat(kept).double().numpy()


def learn(texts: dict[str, TextTower], rows: Rows, width: int, found: list[dict[str, TextLatents]]) -> dict:
    learner = Learner(texts, {rows: width})
    for first in range(0, len(found), 100):
        group = found[first : first + 100]
        learner.add([f"{first + i}" for i in range(len(group))], group)
    return learner.finish(found[0])


@pytest.mark.parametrize("trim", [False, True])
def test_the_columns_are_the_leading_singular_vectors_of_the_states(trim: bool) -> None:
    found = captions({"text": WIDTH}, 300)
    made = learn({"text": tower(trim=trim)}, (("text",),), 8, found)["text"]
    states = stacked(found + [found[0]] * 30, "text", trim)  # the empty caption counts as a tenth of the others
    _, singular, vectors = np.linalg.svd(states)
    expected = vectors[:8].T
    signs = np.sign((made.array.astype(np.float64) * expected).sum(axis=0))
    np.testing.assert_allclose(made.array, expected * signs, atol=2e-3)
    np.testing.assert_allclose(made.energies, (singular**2 / (singular**2).sum())[:8], atol=1e-8)
    largest = np.take_along_axis(made.array, np.abs(made.array).argmax(axis=0)[None], 0)
    assert (largest > 0).all()
    assert (made.captions, made.input_width, made.together) == (330, WIDTH, ())
    assert made.energy == pytest.approx(sum(made.energies))


def test_the_same_captions_give_the_same_bytes_and_the_first_columns_are_a_projection() -> None:
    found = captions({"text": WIDTH}, 250)
    whole = learn({"text": tower()}, (("text",),), 12, found)["text"]
    assert learn({"text": tower()}, (("text",),), 12, found)["text"] == whole
    threads = torch.get_num_threads()
    torch.set_num_threads(1 + threads % 2)
    assert learn({"text": tower()}, (("text",),), 5, found)["text"] == whole.first(5)
    torch.set_num_threads(threads)


def test_projecting_rounds_to_float16_and_sums_in_float64() -> None:
    rng = np.random.default_rng(3)
    states = torch.tensor(rng.standard_normal((2, 5, WIDTH)) * 1000).float()
    projection = learn({"text": tower()}, (("text",),), 7, captions({"text": WIDTH}, 50))["text"]
    expected = states.half().double().numpy() @ projection.array.astype(np.float64)
    found = project(states, matrix_of(projection))
    assert found.dtype == torch.float32 and found.shape == (2, 5, 7)
    np.testing.assert_array_equal(found.numpy(), expected.astype(np.float16))


def test_towers_that_a_layer_shares_are_projected_by_one_matrix() -> None:
    """As in SD3: two towers side by side, zero-padded to the width of a third."""
    widths = {"a": 4, "b": 6, "c": 16}
    rows: Rows = (("a", "b"), ("c",))
    found = captions(widths, 200)
    made = learn({name: tower(width) for name, width in widths.items()}, rows, 9, found)
    whole = [stacked(found + [found[0]] * 20, name) for name in widths]
    first = np.pad(np.concatenate(whole[:2], axis=1), [(0, 0), (0, 6)])
    # each row counts equally
    total = first.T @ first / (first**2).sum() + whole[2].T @ whole[2] / (whole[2] ** 2).sum()
    values, vectors = np.linalg.eigh(total / 2)
    expected = vectors[:, ::-1][:, :9]
    joint = made["c"].array.astype(np.float64)
    signs = np.sign((joint * expected).sum(axis=0))
    np.testing.assert_allclose(joint, expected * signs, atol=2e-3)
    np.testing.assert_array_equal(np.concatenate([made["a"].array, made["b"].array]), made["c"].array[:10])
    assert all(projection.together == rows for projection in made.values())
    np.testing.assert_allclose(made["a"].energies, values[::-1][:9], atol=1e-8)


def test_captions_that_span_too_few_dimensions_are_refused() -> None:
    found = captions({"text": WIDTH}, 2)
    with pytest.raises(RequestError, match=r"onto 14 dimensions, because .* span only 12\. Set `text\.width` to at"):
        learn({"text": tower()}, (("text",),), 14, found)
    with pytest.raises(RequestError, match="No captions were found"):
        Learner({"text": tower()}, {(("text",),): 3}).finish(found[0])


@pytest.mark.parametrize(
    ("widths", "together", "message"),
    [
        ({"text": 24}, (), r"states of text have 24 dimensions, so they cannot be projected onto 24"),
        ({"txt": 4}, (), r"there are none of txt"),
        ({"pooled": 4}, (), r"there are none of pooled"),
        ({"text": 4}, (("text",), ("wide",)), r"text and wide, which share one projection"),
        ({"text": 4, "wide": 4}, (("text", "text"), ("wide",)), r"must be listed once"),
    ],
)
def test_requests_that_make_no_sense_are_refused(widths: dict[str, int], together: Rows, message: str) -> None:
    texts = {"text": tower(), "wide": tower(40), "pooled": tower(states=False, pooled=8)}
    with pytest.raises(RequestError, match=message):
        groups_of(texts, widths, together)


def test_towers_are_grouped_by_the_projection_that_they_share() -> None:
    texts = {"text": tower(), "wide": tower(40), "other": tower()}
    assert groups_of(texts, {"text": 4, "wide": 5}) == {(("text",),): 4, (("wide",),): 5}
    rows: Rows = (("text",), ("wide",))
    assert groups_of(texts, {"text": 30, "wide": 30, "other": 3}, rows) == {rows: 30, (("other",),): 3}
    assert groups_of(texts, {"other": 3}, rows) == {(("other",),): 3}


def test_the_sample_is_bounded() -> None:
    learner = Learner({"text": tower()}, {(("text",),): 3})
    group = captions({"text": WIDTH}, 8)
    assert not learner.is_full
    learner.add([str(i) for i in range(SAMPLE_SIZE)], group * (SAMPLE_SIZE // 8))
    assert learner.is_full and learner.finish(group[0])["text"].captions == SAMPLE_SIZE * (1 + EMPTY_SHARE) + 0.4
