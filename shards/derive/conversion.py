"""Decide whether a root's stored values can be converted to a requested encoding, and list the reasons if not."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from pydantic import Field

from shards.base.config import Config, flatten
from shards.base.errors import RequestError
from shards.base.store import Place
from shards.format.encoding import FALLBACK, TABLE_PREFIX, EncodingRecord
from shards.format.towers import CAUSAL, FeatureTower, ImageStorage, TextStorage, TextTower

CHANGEABLE = {
    "image": {"storage", "posterior", "scale", "shift", "weights.name"},
    "texts": {"storage", "trim", "states", "pooled", "width", "projection", "weights.name", "tokenizer.name"},
    "features": {"storage", "weights.name"},
}
"""Fields of a tower that may differ between source and target. Among these, the fields that determine how much
information is stored can only be changed to store less."""


@dataclass(frozen=True)
class Conversion:
    """A conversion between two encodings that `plan_conversion` found to be possible."""

    source: EncodingRecord
    target: EncodingRecord
    reencoded: frozenset[str] = frozenset()
    """Target text towers for which captions are encoded; all other towers use the source's values."""

    @property
    def has_new_captions(self) -> bool:
        """Whether the target's captions differ from the source's, or come from a different table."""
        source, target = self.source, self.target
        columns = [name.removeprefix(TABLE_PREFIX).partition(FALLBACK)[0] for name in target.captions]
        return source.captions != target.captions or _differ(source.tables, target.tables, columns)

    @property
    def has_new_scores(self) -> bool:
        """Whether the target's scores differ from the source's, or come from a different table."""
        source, target = self.source, self.target
        return source.scores != target.scores or _differ(source.tables, target.tables, target.scores)


def plan_conversion(source: EncodingRecord, target: EncodingRecord, may_encode: bool = False) -> Conversion:
    """Plan the conversion from one encoding to another. Raises RequestError, with a message that lists every reason, if
    the conversion is impossible.

    With `may_encode`, captions are encoded with each text tower whose latents cannot be converted, and the target may
    have new captions and scores from tables in addition to some of the stored ones.
    """
    problems = [
        f"{field}: {stored!r} in the source, {wanted!r} requested"
        for field in ("max_characters", "compute_dtype")
        if (stored := getattr(source, field)) != (wanted := getattr(target, field))
    ]
    how = Conversion(source, target)
    if how.has_new_captions:
        problems += caption_problems(source.captions, target.captions, may_encode)
    if how.has_new_scores:
        problems += score_problems(source, target, may_encode)
    problems += image_problems(source, target)
    by_text = {name: text_problems(name, source.texts.get(name), tower) for name, tower in target.texts.items()}
    reencoded = frozenset(name for name, reasons in by_text.items() if may_encode and (reasons or how.has_new_captions))
    problems += [reason for name in sorted(by_text.keys() - reencoded) for reason in by_text[name]]
    problems += [r for n, tower in target.features.items() for r in feature_problems(n, source.features.get(n), tower)]
    if problems:
        raise RequestError(
            f"The root cannot be converted to the requested encoding: {'; '.join(problems)}. Request only what the "
            f"root stores, or encode the tars into a new root."
        )
    return replace(how, reencoded=reencoded)


def _differ(tables: Mapping[str, str], others: Mapping[str, str], columns: Iterable[str]) -> bool:
    return any(tables.get(column) != others.get(column) for column in columns)


def score_problems(source: EncodingRecord, target: EncodingRecord, may_encode: bool) -> list[str]:
    """List the reasons why the target's scores cannot be taken from tables and from the source."""
    if not may_encode:
        return [f"scores: {source.scores!r} in the source, {target.scores!r} requested"]
    stored = ", ".join(source.scores) or "none"
    return [
        f"scores: {name} is neither from a table nor stored in the source, which has {stored}"
        for name in target.scores
        if name not in source.scores and name not in target.tables
    ]


def caption_problems(stored: Sequence[str], wanted: Sequence[str], may_encode: bool) -> list[str]:
    """List the reasons why the target's captions cannot be taken from tables and from the source."""
    if not may_encode:
        return [f"captions: {stored!r} in the source, {wanted!r} requested"]
    fields = [name.partition(FALLBACK)[2] if name.startswith(TABLE_PREFIX) else name for name in wanted]
    return [
        f"captions: {name} is not stored in the source, which has {', '.join(stored)}, and is not a table"
        for name in fields
        if name and name not in stored
    ]


def image_problems(source: EncodingRecord, target: EncodingRecord) -> list[str]:
    """List the reasons why the stored image latents cannot be converted to the target's encoding."""
    stored, wanted = source.image, target.image
    problems = _differences("image", "image", stored, wanted)
    if stored.posterior != wanted.posterior and (stored.posterior, wanted.posterior) != ("moments", "mean"):
        problems.append(
            f"image.posterior: {stored.posterior} is stored, which cannot be converted to {wanted.posterior}"
        )
    return problems + _lost_precision("image", stored.storage, wanted.storage)


def text_problems(name: str, stored: TextTower | None, wanted: TextTower) -> list[str]:
    """List the reasons why a tower's stored text latents cannot be converted to the target's encoding."""
    place = f"texts.{name}"
    if stored is None:
        return [f"{place}: the root has no such text tower"]
    problems = _differences("texts", place, stored, wanted)
    if wanted.states and not stored.states:
        problems.append(f"{place}.states: only the pooled output is stored")
    if wanted.pooled and wanted.pooled != stored.pooled:
        problems.append(f"{place}.pooled: {stored.pooled} in the source, {wanted.pooled} requested")
    if wanted.states and stored.states:
        problems += _lost_precision(place, stored.storage, wanted.storage)
        problems += _lost_dimensions(place, stored, wanted)
        if stored.trim and not wanted.trim:
            problems.append(f"{place}.trim: the states of padding tokens are not stored")
        if wanted.trim and not (stored.trim or stored.masked or CAUSAL.fullmatch(stored.class_name)):
            problems.append(
                f"{place}.trim: {stored.class_name} attends to padding, so every token's state depends on the padding"
            )
    return problems


def _lost_dimensions(place: str, stored: TextTower, wanted: TextTower) -> list[str]:
    """List the reason why a tower's stored states cannot be projected as requested, if there is one."""
    if stored.input_width != wanted.input_width:
        return [
            f"{place}: the hidden states have {stored.input_width} dimensions in the source, but {wanted.input_width} "
            f"in the requested encoding"
        ]
    if stored.projection is None or stored.projection == wanted.projection:
        return []
    if wanted.projection is None or wanted.width > stored.width:
        return [
            f"{place}.width: the source keeps only {stored.width} of {stored.input_width} dimensions, so "
            f"{wanted.width} cannot be restored"
        ]
    if not np.array_equal(stored.projection.array[:, : wanted.width], wanted.projection.array):
        return [
            f"{place}.projection: the source uses a different projection, and projected states cannot be converted to "
            f"the requested one"
        ]
    return []


def feature_problems(name: str, stored: FeatureTower | None, wanted: FeatureTower) -> list[str]:
    """List the reasons why a tower's stored features cannot be converted to the target's encoding."""
    place = f"features.{name}"
    if stored is None:
        return [f"{place}: the root has no such feature tower, and features can only be computed from images"]
    return _differences("features", place, stored, wanted) + _lost_precision(place, stored.storage, wanted.storage)


def _lost_precision(place: str, stored: str, wanted: str) -> list[str]:
    if wanted != "float16" or stored == wanted:
        return []
    return [f"{place}.storage: {stored} is stored, and the float16 precision cannot be restored"]


def _differences(kind: str, place: str, stored: Config, wanted: Config) -> list[str]:
    a, b = (flatten(tower.model_dump(mode="json")) for tower in (stored, wanted))
    return [
        f"{place}.{field}: {a.get(field)!r} in the source, {b.get(field)!r} requested"
        for field in a | b
        if not {field, field.partition(".")[0]} & CHANGEABLE[kind] and a.get(field) != b.get(field)
    ]


class Changes(Config):
    """Requested changes to the encoding of a derived root. Everything else is kept from the source."""

    towers: list[str] | None = None
    """Text and feature towers to keep, such as texts.clip; null keeps all."""
    text_storage: dict[str, TextStorage] = Field(default_factory=dict)
    """Text tower → storage; `*` stands for all towers."""
    text_trim: dict[str, bool] = Field(default_factory=dict)
    """Text tower → whether to drop padding tokens; `*` stands for all towers."""
    text_width: dict[str, int] = Field(default_factory=dict)
    """Text tower → number of dimensions onto which its states are projected; `*` stands for all towers."""
    text_joint: tuple[tuple[str, ...], ...] = ()
    """Text towers that are projected jointly; see `Projection.joint`."""
    text_deduplicate: bool | None = None
    """Whether to store identical text latents only once per MDS file."""
    text_projection: Place | None = None
    """Root whose projections are reused instead of computing new ones."""
    image_storage: ImageStorage | None = None
    image_posterior: Literal["mean"] | None = None


def apply_changes(source: EncodingRecord, changes: Changes) -> EncodingRecord:
    """Return the encoding of `source` with the changes applied. Raises RequestError if a named tower does not exist or
    no text tower would remain."""
    existing = [f"{kind}.{name}" for kind in ("texts", "features") for name in getattr(source, kind)]
    keep = set(existing if changes.towers is None else changes.towers)
    choices = (*changes.text_storage, *changes.text_trim, *changes.text_width)
    named = {f"texts.{name}" for name in choices if name != "*"}
    if missing := sorted((keep | named) - set(existing)):
        raise RequestError(
            f"The root has no tower named {' or '.join(missing)}. Choose from its towers: {', '.join(existing)}."
        )

    def chosen(choice: Mapping[str, Any], name: str, default: Any) -> Any:
        return choice.get(name, choice.get("*", default))

    texts = {
        name: tower.model_copy(
            update={
                "storage": chosen(changes.text_storage, name, tower.storage),
                "trim": chosen(changes.text_trim, name, tower.trim) and tower.states,
            }
        )
        for name, tower in source.texts.items()
        if f"texts.{name}" in keep
    }
    if not texts:
        raise RequestError(
            "`--towers` names no text tower, but training needs at least one. Add one in the form texts.NAME."
        )
    image = {"storage": changes.image_storage, "posterior": changes.image_posterior}
    return source.model_copy(
        update={
            "image": source.image.model_copy(update={name: value for name, value in image.items() if value}),
            "texts": texts,
            "deduplicates_text": source.deduplicates_text
            if changes.text_deduplicate is None
            else changes.text_deduplicate,
            "features": {name: tower for name, tower in source.features.items() if f"features.{name}" in keep},
        }
    )
