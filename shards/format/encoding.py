"""The encoding record: what the numbers in a latents root mean. One per root; every later run must match it."""

import hashlib
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator

from shards.base.config import Config, flatten
from shards.base.durable import canonical_json, parse_sealed_json, sealed_json
from shards.base.errors import RequestError
from shards.base.store import Store
from shards.format import image, text
from shards.format.buckets import Bucket
from shards.format.towers import ONLY_TEXT, FeatureTower, ImageTower, TextTower, Weights

FILE_NAME = "encoding.json"
SIZE_TYPE = "ndarray:int32:4"
ADDED_LATER = {"resampler": "pillow", "color": "as_stored"}
"""Fields of `image` that the first roots do not have; so filled in, they mean the same, and have no part in the id."""


class EncodingRecord(Config):
    """All of it. `id` hashes what changes a sample's stored bytes, and nothing else."""

    schema_version: Literal[1, 2] = 2
    """1: a root that was begun before there were towers. Its columns are named without one, and its id is as it was."""
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
        if self.schema_version == 1:
            fields = as_version_1(self)
            for model in ("vae", "text_encoder", "tokenizer"):
                del fields[model]["name"]
            del fields["image"]["scaling_factor"]
            fields["image"] = {key: value for key, value in fields["image"].items() if ADDED_LATER.get(key) != value}
        else:
            # a field that is added later, at its default, says what roots without it meant
            fields = self.model_dump(mode="json", exclude_defaults=True) | {"schema_version": 2}
            del fields["image"]["scale"], fields["image"]["shift"]
            _drop_names(fields)
        return hashlib.sha256(canonical_json(fields)).hexdigest()[:16]

    def columns(self, bucket: Bucket) -> dict[str, str]:
        """MDS column → type, for samples of `bucket`, by the names of version 2."""
        columns = {"key": "str", "caption": "str", **image.columns(self.image, bucket)}
        for name, tower in self.texts.items():
            columns |= text.columns(name, tower, several=self.several)
        for name, feature_tower in self.features.items():
            columns |= image.feature_columns(name, feature_tower, bucket)
        columns |= {"size": SIZE_TYPE, "scores": "ndarray:float32:4"}
        if self.schema_version == 1 and not (self.several and self.texts[ONLY_TEXT].trim):
            columns.pop(f"num_tokens.{ONLY_TEXT}", None)
        return columns

    def stored_columns(self, bucket: Bucket) -> dict[str, str]:
        """The same by the names that this root's files have."""
        return {self.stored_name(name): kind for name, kind in self.columns(bucket).items()}

    def stored_name(self, column: str) -> str:
        """What a column is called in this root's files."""
        return column.removesuffix(f".{ONLY_TEXT}") if self.schema_version == 1 else column

    def differences(self, other: "EncodingRecord") -> list[str]:
        """`field: here ≠ there` for every field that differs, the models' names and the version aside."""
        here, there = (flatten(record.model_dump(mode="json", exclude={"schema_version"})) for record in (self, other))
        return [
            f"{path}: {here.get(path, 'absent')!r} ≠ {there.get(path, 'absent')!r}"
            for path in here | there
            if here.get(path) != there.get(path) and not path.endswith(".name")
        ]

    def sealed(self) -> bytes:
        """The bytes of ROOT/encoding.json, sealed."""
        fields = as_version_1(self) if self.schema_version == 1 else self.model_dump(mode="json")
        for tower in fields.get("texts", {}).values():
            if tower["quantised"] is None:  # which earlier programs do not know
                del tower["quantised"]
        return sealed_json({**fields, "id": self.id})

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
        try:
            record = cls.model_validate(from_version_1(fields) if fields.get("schema_version") == 1 else fields)
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


def from_version_1(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a record of version 1, which knew Stable Diffusion's towers alone, as this version has them.

    Raises:
        KeyError: one is missing.
    """
    of_image, texts = dict(fields["image"]), dict(fields["text"])
    channels = of_image.pop("latent_channels")
    scale = of_image.pop("scaling_factor")
    captions, max_characters = texts.pop("captions"), texts.pop("max_characters")
    return {
        "schema_version": 1,
        "image": {
            **of_image,
            "class_name": "AutoencoderKL",
            "weights": fields["vae"],
            "channels": channels,
            "scale": [scale] * channels,
            "shift": [0.0] * channels,
        },
        "texts": {
            ONLY_TEXT: {
                **texts,
                "class_name": "CLIPTextModel",
                "weights": fields["text_encoder"],
                "tokenizer": fields["tokenizer"],
                "max_tokens": texts["length"],
            }
        },
        "captions": captions,
        "max_characters": max_characters,
        "compute_dtype": fields["compute_dtype"],
    }


def as_version_1(record: EncodingRecord) -> dict[str, Any]:
    """The inverse of `from_version_1`."""
    fields = record.model_dump(mode="json")
    of_image, tower = fields["image"], fields["texts"][ONLY_TEXT]
    kept = ("posterior", "downsampling", "crop", "resampling", "decoder", "resampler", "color")
    return {
        "schema_version": 1,
        "vae": of_image["weights"],
        "text_encoder": tower["weights"],
        "tokenizer": tower["tokenizer"],
        "image": {
            **{name: of_image[name] for name in kept},
            "latent_channels": of_image["channels"],
            "scaling_factor": of_image["scale"][0],
        },
        "text": {
            **{name: tower[name] for name in ("storage", "trim", "length", "width")},
            "captions": fields["captions"],
            "max_characters": fields["max_characters"],
        },
        "compute_dtype": fields["compute_dtype"],
    }


def _drop_names(fields: Any) -> None:
    """Take the `name` beside every `sha256` out, in place."""
    if isinstance(fields, dict):
        if "sha256" in fields:
            fields.pop("name", None)
        for value in fields.values():
            _drop_names(value)
