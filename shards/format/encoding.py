"""The encoding record: what the numbers in a latents root mean. One per root; every later run must match it."""

import hashlib
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator

from shards.base.config import Config, flatten
from shards.base.durable import canonical_json, check_version, parse_sealed_json, sealed_json
from shards.base.errors import RequestError
from shards.base.store import Store
from shards.format import image, text
from shards.format.buckets import Bucket
from shards.format.towers import FeatureTower, ImageTower, TextTower, Weights

FILE_NAME = "encoding.json"
SIZE_TYPE = "ndarray:int32:4"
VERSION: Literal[2] = 2


class EncodingRecord(Config):
    """All of it. `id` hashes what changes a sample's stored bytes, and nothing else."""

    schema_version: Literal[2] = VERSION
    image: ImageTower
    texts: dict[str, TextTower]
    features: dict[str, FeatureTower] = Field(default_factory=dict)
    captions: tuple[str, ...]
    """Where the captions were found: `txt` or `json:FIELD`. Where there are several, the text columns have a leading
    axis, and `caption` is a JSON list with an entry for each, null where the sample has none."""
    max_characters: int
    """Longer captions were cut here, before the tokenizer."""
    compute_dtype: Literal["float32", "float16", "bfloat16"]

    @field_validator("texts", "features")
    @classmethod
    def _sort(cls, towers: dict[str, Any]) -> dict[str, Any]:
        return dict(sorted(towers.items()))

    @property
    def several(self) -> bool:
        """Whether a sample may have more than one caption."""
        return len(self.captions) > 1

    @property
    def weights(self) -> dict[str, Weights]:
        """Of each tower and tokenizer, by its place in this record."""
        texts = {f"texts.{name}": tower.weights for name, tower in self.texts.items()}
        tokenizers = {f"texts.{name}.tokenizer": tower.tokenizer for name, tower in self.texts.items()}
        features = {f"features.{name}": tower.weights for name, tower in self.features.items()}
        return {"image": self.image.weights, **texts, **tokenizers, **features}

    @property
    def id(self) -> str:
        """16 hex digits. Weights count by content, not by name; scale and shift are applied later, by the trainer."""
        # a field that is added later, at its default, says what roots without it meant
        fields = self.model_dump(mode="json", exclude_defaults=True) | {"schema_version": VERSION}
        del fields["image"]["scale"], fields["image"]["shift"]
        _drop_names(fields)
        return hashlib.sha256(canonical_json(fields)).hexdigest()[:16]

    def columns(self, bucket: Bucket) -> dict[str, str]:
        """MDS column → type, for samples of `bucket`."""
        columns = {"key": "str", "caption": "str", **image.columns(self.image, bucket)}
        for name, tower in self.texts.items():
            columns |= text.columns(name, tower, several=self.several)
        for name, feature_tower in self.features.items():
            columns |= image.feature_columns(name, feature_tower, bucket)
        columns |= {"size": SIZE_TYPE, "scores": "ndarray:float32:4"}
        return columns

    def differences(self, other: "EncodingRecord") -> list[str]:
        """`field: here ≠ there` for every field that differs, the models' names aside."""
        here, there = (flatten(record.model_dump(mode="json")) for record in (self, other))
        return [
            f"{path}: {here.get(path, 'absent')!r} ≠ {there.get(path, 'absent')!r}"
            for path in here | there
            if here.get(path) != there.get(path) and not path.endswith(".name")
        ]

    def sealed(self) -> bytes:
        """The bytes of ROOT/encoding.json, sealed."""
        return sealed_json({**self.model_dump(mode="json"), "id": self.id})

    def save(self, store: Store) -> None:
        """Write ROOT/encoding.json over what is there."""
        store.write(FILE_NAME, self.sealed())

    @classmethod
    def load(cls, store: Store) -> "EncodingRecord":
        """Read ROOT/encoding.json.

        Raises:
            RequestError: it is not a latents root, or one of another version.
            DamagedFile: the record's bytes are not those that were written.
        """
        try:
            data = store.read(FILE_NAME)
        except FileNotFoundError:
            raise RequestError(
                f"{store.where()} is not a latents root: it has no {FILE_NAME}. Give the folder that stage 1 wrote "
                f"(`output` of its config), or run `make precompute SHARD=all` first."
            ) from None
        return cls.parse(data, store.where(FILE_NAME))

    @classmethod
    def parse(cls, data: bytes, where: str) -> "EncodingRecord":
        """The bytes of an encoding.json; `where` they came from, for people. Raises as `load`."""
        fields = parse_sealed_json(data, where)
        id = fields.pop("id")
        check_version(fields.get("schema_version"), VERSION, where)
        try:
            record = cls.model_validate(fields)
        except (ValidationError, KeyError) as error:
            wrong = f"no {error}"
            if isinstance(error, ValidationError):
                wrong = ", ".join(".".join(map(str, item["loc"])) for item in error.errors())
            raise RequestError(
                f"{where} was written by another version of this program: it has other fields than this one's "
                f"({wrong}). Use that version, or encode into a new root."
            ) from None
        if record.id != id:
            raise RequestError(
                f"{where} says that its encoding's id is {id}, and this program makes {record.id} of its fields: "
                f"another version of it wrote them. Use that version, or encode into a new root."
            )
        return record


def _drop_names(fields: Any) -> None:
    """Take the `name` beside every `sha256` out, in place."""
    if isinstance(fields, dict):
        if "sha256" in fields:
            fields.pop("name", None)
        for value in fields.values():
            _drop_names(value)
