"""The encoding record: how the numbers in a latents root were computed. Each root has one record, which later jobs must
match."""

import hashlib
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from pydantic import Field, ValidationError, field_validator

from shards.base.config import Config, flatten
from shards.base.durable import canonical_json, check_version, parse_sealed_json, sealed_json
from shards.base.errors import RequestError
from shards.base.store import Store
from shards.format import image, text
from shards.format.buckets import Bucket
from shards.format.scores import LAION_SCORES
from shards.format.text import CAPTION_WEIGHTS, TEXT_SAMPLE
from shards.format.towers import FeatureTower, ImageTower, TextTower, Weights

FILE_NAME = "encoding.json"
SIZE_TYPE = "ndarray:int32:4"
VERSION: Literal[2] = 2
TABLE_PREFIX = "table:"
FALLBACK = "|"
"""Parts of the name of a caption source that is a table: `table:COLUMN`, or `table:COLUMN|FIELD` with the field that
replaces captions that the table lacks."""


MAX_VALUE_LENGTH = 200
"""Maximum number of characters of a value in a message about different encodings."""


class EncodingRecord(Config):
    """Complete description of a root's encoding. `id` hashes exactly the fields that affect a sample's stored bytes."""

    schema_version: Literal[2] = VERSION
    image: ImageTower
    texts: dict[str, TextTower]
    features: dict[str, FeatureTower] = Field(default_factory=dict)
    captions: tuple[str, ...]
    """Sources of the captions: `txt`, `json:FIELD`, or a table (see TABLE_PREFIX). With several sources, the text
    columns have a leading caption axis, and `caption` is a JSON list with one entry per source, null where the sample
    has no caption."""
    caption_weights: tuple[int, ...] = ()
    """How often training draws each source, relative to the others; empty: equally often."""
    tables: dict[str, str] = Field(default_factory=dict)
    """Column of a table with captions or scores → SHA-256 of the file, followed by ` by KEY` if its key column is not
    `key`."""
    max_characters: int
    """Maximum length of captions in characters. Longer captions were cut before tokenization."""
    compute_dtype: Literal["float32", "float16", "bfloat16"]
    scores: tuple[str, ...] = LAION_SCORES
    """Names of the stored scores, in the order of the MDS column `scores`."""
    deduplicates_text: bool = False
    """Whether identical text latents are stored only once per MDS file; see shards.format.text.TEXT_SAMPLE."""

    @field_validator("texts", "features")
    @classmethod
    def _sort(cls, towers: dict[str, Any]) -> dict[str, Any]:
        return dict(sorted(towers.items()))

    @property
    def several(self) -> bool:
        """Whether a sample may have more than one caption."""
        return len(self.captions) > 1

    @property
    def most_captions(self) -> int:
        """Maximum number of captions that a batch holds for a sample, which repeats captions according to their
        weights."""
        return sum(self.caption_weights) or len(self.captions)

    def weights_of(self, captions: Sequence[object | None]) -> dict[str, np.ndarray]:
        """Return the column with the weights of a sample's captions, or no column if all sources have the same weight.

        Args:
            captions: the sample's caption of each source, or None.
        """
        if not self.caption_weights:
            return {}
        pairs = zip(self.caption_weights, captions, strict=True)
        return {CAPTION_WEIGHTS: np.array([weight for weight, caption in pairs if caption is not None], np.int32)}

    @property
    def weights(self) -> dict[str, Weights]:
        """Weights of every tower and tokenizer, keyed by path in this record."""
        texts = {f"texts.{name}": tower.weights for name, tower in self.texts.items()}
        tokenizers = {f"texts.{name}.tokenizer": tower.tokenizer for name, tower in self.texts.items()}
        features = {f"features.{name}": tower.weights for name, tower in self.features.items()}
        return {"image": self.image.weights, **texts, **tokenizers, **features}

    @property
    def id(self) -> str:
        """Hash of the encoding (16 hex digits). Weights are identified by content rather than name; scale and shift
        are left out, because the trainer applies them."""
        # defaults are left out, so that a new field whose default is the old behaviour does not change existing ids
        fields = self.model_dump(mode="json", exclude_defaults=True) | {"schema_version": VERSION}
        del fields["image"]["scale"], fields["image"]["shift"]
        _drop_names(fields)
        return hashlib.sha256(canonical_json(fields)).hexdigest()[:16]

    def columns(self, bucket: Bucket) -> dict[str, str]:
        """Return a dict from MDS column to type for samples in `bucket`."""
        columns = {"key": "str", "caption": "str", **image.columns(self.image, bucket)}
        for name, tower in self.texts.items():
            columns |= text.columns(name, tower, self.several, self.deduplicates_text)
        for name, feature_tower in self.features.items():
            columns |= image.feature_columns(name, feature_tower, bucket)
        if self.caption_weights:
            columns[CAPTION_WEIGHTS] = "ndarray:int32"
        if self.deduplicates_text:
            columns[TEXT_SAMPLE] = "ndarray:int32:1"
        columns |= {"size": SIZE_TYPE, "scores": f"ndarray:float32:{len(self.scores)}"}
        return columns

    def differences(self, other: "EncodingRecord") -> list[str]:
        """List every field that differs between the records, as `field: self ≠ other`. Model names are ignored."""
        here, there = (flatten(record.model_dump(mode="json")) for record in (self, other))
        return [
            f"{path}: {_shown(here.get(path, 'absent'))} ≠ {_shown(there.get(path, 'absent'))}"
            for path in here | there
            if here.get(path) != there.get(path) and not path.endswith(".name")
        ]

    def sealed(self) -> bytes:
        """Serialise the record to the sealed bytes of ROOT/encoding.json."""
        return sealed_json({**self.model_dump(mode="json"), "id": self.id})

    def save(self, store: Store) -> None:
        """Write ROOT/encoding.json, replacing any existing file."""
        store.write(FILE_NAME, self.sealed())

    @classmethod
    def load(cls, store: Store) -> "EncodingRecord":
        """Read ROOT/encoding.json. Raises RequestError if the folder is not a latents root, and the same errors as
        `parse`."""
        try:
            data = store.read(FILE_NAME)
        except (FileNotFoundError, NotADirectoryError):
            raise RequestError(
                f"{store.where()} is not a latents root: it has no {FILE_NAME}. Pass the folder that stage 1 wrote "
                f"(`output` in its config), or run `make precompute SHARD=all` first."
            ) from None
        return cls.parse(data, store.where(FILE_NAME))

    @classmethod
    def parse(cls, data: bytes, where: str) -> "EncodingRecord":
        """Parse the bytes of the encoding.json at the path or URL `where`. Raises RequestError if it has a different
        format version or was written by a different version of latentmill, and DamagedFile if it was modified after it
        was written."""
        fields = parse_sealed_json(data, where)
        check_version(fields.get("schema_version"), VERSION, where)
        id = fields.pop("id", None)
        try:
            record = cls.model_validate(fields)
        except ValidationError as error:
            wrong = ", ".join(".".join(map(str, item["loc"])) for item in error.errors())
            raise RequestError(
                f"{where} was written by a different version of latentmill: its fields do not match this version's "
                f"({wrong}). Use the version that wrote the file, or encode into a new root."
            ) from None
        if record.id != id:
            raise RequestError(
                f"{where} records the encoding id {id}, but this version of latentmill computes {record.id} from its "
                f"fields, so a different version wrote the file. Use that version, or encode into a new root."
            )
        return record


def _shown(value: Any) -> str:
    """Format a value for a message; long values, such as a projection's matrix, are replaced by their hash."""
    text = repr(value)
    return text if len(text) <= MAX_VALUE_LENGTH else f"SHA-256 {hashlib.sha256(text.encode()).hexdigest()[:12]}…"


def _drop_names(fields: Any) -> None:
    """Remove, in place, the `name` from every dict that also has a `sha256`."""
    if isinstance(fields, dict):
        if "sha256" in fields:
            fields.pop("name", None)
        for value in fields.values():
            _drop_names(value)
