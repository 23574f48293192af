"""A study's protocol: questions, raters, items and the rules for counting votes, fixed before the first vote.

STUDY/protocol.json     the protocol with its SHA-256
STUDY/secret            32 random bytes that determine sides, order and image names; the protocol contains their SHA-256
STUDY/pictures/*.png    named by HMAC-SHA256(secret, content)
STUDY/votes.sqlite      invitations and votes
"""

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, StringConstraints, TypeAdapter, field_validator

from shards.base.config import Config
from shards.base.durable import (
    check_version,
    create_file,
    make_folder,
    output_errors,
    read_sealed_json,
    sealed_json,
    write_file,
)
from shards.base.errors import RequestError, WorkError
from shards.base.store import LocalPath

VERSION = 2
RECORD, SECRET, PICTURES = "protocol.json", "secret", "pictures"
Text = Annotated[str, StringConstraints(min_length=1, max_length=2000)]
QUESTIONS: dict[str, Text] = {
    "quality": "Which picture is of better quality?",
    "alignment": "Which picture fits the text better?",
}


class GoldConfig(Config):
    """Gold items: pairs whose better image is known, which reveal raters who click without looking."""

    share: float = Field(0.05, le=0.5)
    """Number of gold items per rater, as a share of the rater's other items. Must be above 0. The number is rounded,
    and is at least one."""
    file: LocalPath | None = None
    """CSV file with the columns prompt, better and worse; image paths are relative to the file. The answer to
    every question counts, and a tie is wrong; for an item whose better image wins only one question, name that question
    in an optional column `question`. null: gold items are made from the sample sets, and the worse image is a pixelated
    image of another prompt."""
    exclude_below: float | None = Field(0.75, gt=0, le=1)
    """Exclude raters whose share of correct answers to gold questions is below this value; null: exclude nobody."""

    @field_validator("share")
    @classmethod
    def _check_share(cls, share: float) -> float:
        if share <= 0:
            raise ValueError(
                "a study without gold items cannot detect raters who click without looking. Set a share above 0, such "
                "as 0.05. To exclude nobody, set exclude_below to null"
            )
        return share


class ProtocolConfig(Config):
    """The questions, and how votes are counted. Changing the protocol requires a new study."""

    name: Text = "Which picture is better?"
    """Title of the raters' page."""
    questions: dict[str, Text] = Field(QUESTIONS, min_length=1)
    """Short name → question shown to raters. Each question is answered separately."""
    raters: int = Field(15, ge=2)
    """Number of raters."""
    votes_per_item: int = Field(5, ge=1)
    """Number of raters who see each item."""
    repeats: float = Field(0.1, ge=0, le=0.5)
    """Share of a rater's items that are shown a second time with the sides swapped. Only the first vote counts."""
    gold: GoldConfig = GoldConfig()
    margin: float = Field(0.1, gt=0, lt=0.5)
    """Two models count as equivalent if the preference is shown to be within one half ± this margin."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed that determines, together with the secret, who sees which items, in what order and on which sides."""


@dataclass(frozen=True)
class Item:
    """A prompt and two images drawn for it."""

    id: str
    prompt_id: str
    prompt: str
    category: str | None
    models: tuple[int, int] | None
    """Indices of the models that drew the images; None for a gold item, whose first image is the better one."""
    pictures: tuple[str, str]
    """File names of the images."""
    question: str | None = None
    """Name of the only question that counts for a gold item. None: every question counts."""


@dataclass(frozen=True)
class Protocol:
    """Everything about a study except its votes."""

    config: ProtocolConfig
    secret_sha256: str
    models: list[dict[str, Any]]
    """Location and identity of each model's sample set."""
    items: list[Item]
    gold: list[Item]

    def as_json(self) -> dict[str, Any]:
        """Return the content of protocol.json."""
        # the items from `gold.file` are in `gold`, so the file may move
        content = PROTOCOL.dump_python(self, mode="json", exclude={"config": {"gold": {"file"}}})
        content["config"]["questions"] = list(self.config.questions.items())  # sealed JSON sorts its keys
        return {"version": VERSION, **content}

    @property
    def sha256(self) -> str:
        """SHA-256 of protocol.json, published before the first vote and stored with the votes."""
        return hashlib.sha256(sealed_json(self.as_json())).hexdigest()

    @property
    def letters(self) -> list[str]:
        """Short names of the models: A, B and so on."""
        return [chr(ord("A") + number) for number in range(len(self.models))]


PROTOCOL = TypeAdapter(Protocol)


@dataclass(frozen=True)
class Study:
    """A prepared study: its folder, protocol and secret."""

    folder: Path
    protocol: Protocol
    secret: bytes

    def picture(self, name: str) -> bytes:
        """Read one of the study's images.

        Raises:
            WorkError: the image is missing, or its content has changed since the study was prepared.
        """
        path = self.folder / PICTURES / name
        data = path.read_bytes() if path.exists() else b""
        if picture_name(self.secret, data) != name:
            raise WorkError(
                f"{path} is {'missing' if not data else 'damaged'}. Restore it from a backup, or run the same "
                f"`prepare` command again to rewrite it."
            )
        return data


def picture_name(secret: bytes, data: bytes) -> str:
    """Derive an image's file name, which reveals nothing about its content without the secret."""
    return hmac.digest(secret, b"picture" + hashlib.sha256(data).digest(), "sha256").hex()[:32] + ".png"


def read_study(folder: Path) -> Study:
    """Load a prepared study.

    Raises:
        RequestError: the folder does not contain a study, or the study has a different format version.
        DamagedFile: the protocol was modified.
        WorkError: the secret is missing, or belongs to a different study.
    """
    try:
        content = read_sealed_json(folder / RECORD)
    except FileNotFoundError:
        raise RequestError(
            f"{folder} is not a study: it has no {RECORD}. Prepare one with `make study A=SAMPLES B=SAMPLES "
            f"OUT={folder}`."
        ) from None
    check_version(content.pop("version"), VERSION, str(folder / RECORD))
    content["config"]["questions"] = dict(content["config"]["questions"])
    protocol = PROTOCOL.validate_python(content)
    path = folder / SECRET
    secret = path.read_bytes() if path.is_file() else b""
    if hashlib.sha256(secret).hexdigest() != protocol.secret_sha256:
        raise WorkError(
            f"{path} is missing, or is not the secret that the study was prepared with. Without that secret, the side "
            f"on which each model was shown cannot be recovered. Restore the file from a backup."
        )
    return Study(folder, protocol, secret)


def check_pictures(study: Study) -> None:
    """Verify that all images of a study are intact.

    Raises:
        WorkError: an image is missing or damaged.
    """
    for name in sorted({name for item in (*study.protocol.items, *study.protocol.gold) for name in item.pictures}):
        study.picture(name)


def make_secret(folder: Path) -> bytes:
    """Return the folder's secret. If there is none yet, create one.

    Raises:
        RequestError: the folder cannot be created.
    """
    path = folder / SECRET
    with output_errors(
        f"The study's folder {folder} cannot be created",
        "With --output (with make study: OUT=FOLDER), choose a folder that you can write to.",
    ):
        make_folder(folder)
    if not path.exists():
        temporary = folder / f".{SECRET}.{secrets.token_hex(4)}"
        temporary.touch(mode=0o600)
        create_file(path, write_file(temporary, secrets.token_bytes(32)))
    return path.read_bytes()
