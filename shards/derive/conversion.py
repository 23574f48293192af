"""What can be made of a root's stored numbers: only what claims no more of them than they hold."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from shards.base.config import Config, flatten
from shards.base.errors import RequestError
from shards.format.encoding import EncodingRecord
from shards.format.towers import CAUSAL, ImageStorage, TextStorage, TextTower

CHANGEABLE = {
    "image": {"storage", "posterior", "scale", "shift", "weights.name"},
    "texts": {"storage", "trim", "states", "pooled", "weights.name", "tokenizer.name"},
    "features": {"storage", "weights.name"},
}
"""Fields of a tower in which the encodings may differ; in those that say how much is stored, one way alone."""


@dataclass(frozen=True)
class Conversion:
    source: EncodingRecord
    target: EncodingRecord
    reencoded: frozenset[str]
    """Text towers of the target that encode the stored captions; all others' numbers are the source's."""


def plan_conversion(source: EncodingRecord, target: EncodingRecord, may_encode: bool = False) -> Conversion:
    """How the source's numbers become the target's.

    Args:
        may_encode: a text tower of which the source has not what the target wants encodes the captions.

    Raises:
        RequestError: all that the source cannot give, and why.
    """
    wrong = [
        f"{field}: {here!r} there, {wanted!r} here"
        for field in ("captions", "max_characters", "compute_dtype")
        if (here := getattr(source, field)) != (wanted := getattr(target, field))
    ]
    wrong += image_problems(source, target)
    of_texts = {name: text_problems(name, source.texts.get(name), tower) for name, tower in target.texts.items()}
    reencoded = frozenset(name for name, problems in of_texts.items() if problems and may_encode)
    wrong += [problem for name in sorted(of_texts.keys() - reencoded) for problem in of_texts[name]]
    wrong += feature_problems(source, target)
    if wrong:
        raise RequestError(
            f"The root cannot become what is asked for: {'; '.join(wrong)}. Ask for what it holds, or encode the tars "
            f"into a new root."
        )
    return Conversion(source, target, reencoded)


def image_problems(source: EncodingRecord, target: EncodingRecord) -> list[str]:
    """What the stored image latents cannot give."""
    here, wanted = source.image, target.image
    problems = _differences("image", "image", here, wanted)
    if here.posterior != wanted.posterior and (here.posterior, wanted.posterior) != ("moments", "mean"):
        problems.append(f"image.posterior: {here.posterior} is stored, of which there is no {wanted.posterior}")
    if (here.storage, wanted.storage) == ("int8", "float16"):
        problems.append("image.storage: what was rounded to int8 is not float16's")
    return problems


def text_problems(name: str, here: TextTower | None, wanted: TextTower) -> list[str]:
    """What the stored text latents of a tower cannot give."""
    place = f"texts.{name}"
    if here is None:
        return [f"{place}: the root has no such tower"]
    problems = _differences("texts", place, here, wanted)
    if wanted.states and not here.states:
        problems.append(f"{place}.states: only the pooled output is stored")
    if wanted.pooled and wanted.pooled != here.pooled:
        problems.append(f"{place}.pooled: {here.pooled} numbers are stored, not {wanted.pooled}")
    if wanted.states and here.states:
        if (here.storage, wanted.storage) == ("float8", "float16"):
            problems.append(f"{place}.storage: what was rounded to float8 is not float16's")
        if here.trim and not wanted.trim:
            problems.append(f"{place}.trim: padding is not stored")
        if wanted.trim and not (here.trim or here.masked or CAUSAL.fullmatch(here.class_name)):
            problems.append(
                f"{place}.trim: {here.class_name} saw the padding behind a caption; every token's state depends on it"
            )
    return problems


def feature_problems(source: EncodingRecord, target: EncodingRecord) -> list[str]:
    """What the stored features cannot give."""
    problems = []
    for name, wanted in target.features.items():
        here, place = source.features.get(name), f"features.{name}"
        if here is None:
            problems.append(f"{place}: the root has none, and they are made of pictures")
            continue
        problems += _differences("features", place, here, wanted)
        if (here.storage, wanted.storage) == ("float8", "float16"):
            problems.append(f"{place}.storage: what was rounded to float8 is not float16's")
    return problems


def _differences(kind: str, place: str, here: Config, wanted: Config) -> list[str]:
    a, b = (flatten(tower.model_dump(mode="json")) for tower in (here, wanted))
    return [
        f"{place}.{field}: {a.get(field)!r} there, {b.get(field)!r} here"
        for field in a | b
        if field not in CHANGEABLE[kind]
        and field.partition(".")[0] not in CHANGEABLE[kind]
        and a.get(field) != b.get(field)
    ]


class Changes(Config):
    """What is to be otherwise in a derived root; what is not given stays."""

    towers: list[str] | None = None
    """Text and feature towers to keep, such as texts.clip; null: all."""
    text_storage: dict[str, TextStorage] = Field(default_factory=dict)
    """Tower → storage; `*`: of all."""
    text_trim: dict[str, bool] = Field(default_factory=dict)
    """Tower → whether padding goes; `*`: of all."""
    image_storage: ImageStorage | None = None
    image_posterior: Literal["mean"] | None = None


def apply_changes(source: EncodingRecord, changes: Changes) -> EncodingRecord:
    """The encoding of `source` with the changes.

    Raises:
        RequestError: a tower that is named is not there.
    """
    keep = changes.towers
    texts = {name: tower for name, tower in source.texts.items() if keep is None or f"texts.{name}" in keep}
    features = {name: tower for name, tower in source.features.items() if keep is None or f"features.{name}" in keep}
    named = [*(keep or []), *(f"texts.{n}" for n in (*changes.text_storage, *changes.text_trim) if n != "*")]
    _check_named(source, named)
    if not texts:
        raise RequestError("`--towers` keeps no text tower, and a model is trained with one. Name one of texts.")
    of_texts = {
        name: tower.model_copy(
            update={
                "storage": _chosen(changes.text_storage, name, tower.storage),
                "trim": _chosen(changes.text_trim, name, tower.trim) and tower.states,
            }
        )
        for name, tower in texts.items()
    }
    image = {"storage": changes.image_storage, "posterior": changes.image_posterior}
    return source.model_copy(
        update={
            "image": source.image.model_copy(update={name: value for name, value in image.items() if value}),
            "texts": of_texts,
            "features": features,
        }
    )


def _chosen(choice: dict[str, Any], name: str, otherwise: Any) -> Any:
    return choice.get(name, choice.get("*", otherwise))


def _check_named(source: EncodingRecord, named: Sequence[str]) -> None:
    there = [*(f"texts.{name}" for name in source.texts), *(f"features.{name}" for name in source.features)]
    if missing := sorted(set(named) - set(there)):
        raise RequestError(f"The root has no {', '.join(missing)}. It has {', '.join(there)}.")
