"""The encoding record: what the numbers in a latents root mean. One per root; every later run must match it."""

import hashlib
from typing import Literal

from pydantic import ValidationError

from shards.base.config import Config, flatten
from shards.base.durable import canonical_json, parse_sealed_json, sealed_json
from shards.base.errors import RequestError
from shards.base.store import Store
from shards.format import text
from shards.format.buckets import Bucket
from shards.format.text import TextStorage

FILE_NAME = "encoding.json"


ADDED_LATER = {"resampler": "pillow", "color": "as_stored"}
"""Fields of `image` that the first roots do not have; so filled in, they mean the same, and have no part in the id."""


class Weights(Config):
    """A model by name, for people, and by content, for machines."""

    name: str
    """Hub name or folder, as the run was told."""
    sha256: str
    """Over its files' own SHA-256s: weights, vocabulary, and what its config says of the computation."""


class ImageEncoding(Config):
    """How a picture becomes image latents."""

    posterior: Literal["moments", "mean"]
    """`moments`: mean and log-variance, 2 × latent_channels planes; `mean`: latent_channels planes."""
    latent_channels: int
    downsampling: int
    """Picture side / latent side."""
    scaling_factor: float
    """The VAE's own; stored latents are unscaled, the trainer multiplies."""
    crop: str
    resampling: str
    decoder: str
    resampler: str = "pillow"
    """Whose implementation of the filter."""
    color: str = "as_stored"
    """`srgb`: embedded profiles were applied; `as_stored`: they were not."""


class TextEncoding(Config):
    """How a caption becomes text latents."""

    storage: TextStorage
    trim: bool
    length: int
    """Tokens of an untrimmed caption, padding included."""
    width: int
    captions: tuple[str, ...]
    """Where the captions were found: `txt` or `json:FIELD`. Where there are several, the text columns have a leading
    axis, and `caption` is a JSON list with an entry for each, null where the sample has none."""
    max_characters: int
    """Longer captions were cut here, before the tokenizer."""

    @property
    def several(self) -> bool:
        """Whether a sample may have more than one caption."""
        return len(self.captions) > 1


class EncodingRecord(Config):
    """All of it. `id` hashes what changes a sample's stored bytes, and nothing else."""

    schema_version: int = 1
    vae: Weights
    text_encoder: Weights
    tokenizer: Weights
    image: ImageEncoding
    text: TextEncoding
    compute_dtype: Literal["float32", "float16", "bfloat16"]

    @property
    def id(self) -> str:
        """16 hex digits. Weights count by content, not by name; the scaling factor is applied later, by the trainer."""
        fields = self.model_dump(mode="json")
        for model in ("vae", "text_encoder", "tokenizer"):
            del fields[model]["name"]
        del fields["image"]["scaling_factor"]
        fields["image"] = {key: value for key, value in fields["image"].items() if ADDED_LATER.get(key) != value}
        return hashlib.sha256(canonical_json(fields)).hexdigest()[:16]

    @property
    def num_planes(self) -> int:
        """Channels of stored image latents: 8 for SD's moments, 4 for its means."""
        return self.image.latent_channels * (2 if self.image.posterior == "moments" else 1)

    def columns(self, bucket: Bucket) -> dict[str, str]:
        """MDS column → type, for samples of `bucket`."""
        height, width = bucket.latent_hw(self.image.downsampling)
        return {
            "key": "str",
            "caption": "str",
            "image_latents": f"ndarray:float16:{self.num_planes},{height},{width}",
            **text.columns(
                self.text.storage, self.text.trim, self.text.length, self.text.width, several=self.text.several
            ),
            "size": "ndarray:int32:4",
            "scores": "ndarray:float32:4",
        }

    def differences(self, other: "EncodingRecord") -> list[str]:
        """`field: here ≠ there` for every field that differs, the models' names aside."""
        here, there = (flatten(record.model_dump(mode="json")) for record in (self, other))
        return [
            f"{path}: {value!r} ≠ {there[path]!r}"
            for path, value in here.items()
            if value != there[path] and not path.endswith(".name")
        ]

    def save(self, store: Store) -> None:
        """Write ROOT/encoding.json, sealed."""
        store.write(FILE_NAME, sealed_json({**self.model_dump(mode="json"), "id": self.id}))

    @classmethod
    def load(cls, store: Store) -> "EncodingRecord":
        """Read ROOT/encoding.json.

        Raises:
            RequestError: it is not a latents root, or one of another version.
            DamagedFile: the record's bytes are not those that were written.
        """
        try:
            fields = parse_sealed_json(store.read(FILE_NAME), store.where(FILE_NAME))
        except FileNotFoundError:
            raise RequestError(
                f"{store.where()} is not a latents root: it has no {FILE_NAME}. Give the folder that stage 1 wrote "
                f"(`output` of its config), or run `make precompute SHARD=all` first."
            ) from None
        fields.pop("id")
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            wrong = ", ".join(".".join(map(str, item["loc"])) for item in error.errors())
            raise RequestError(
                f"{store.where()} was written by another version of this program: {FILE_NAME} has other fields than "
                f"this one's ({wrong}). Use that version, or encode into a new root."
            ) from None
