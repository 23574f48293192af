"""What a study asks, of whom, how often, and how votes are counted: fixed, and hashed, before the first vote.

STUDY/protocol.json     all of it, sealed
STUDY/secret            32 random bytes, of which the protocol has the hash: sides, order and names of pictures
STUDY/pictures/*.png    named by HMAC-SHA256(secret, content)
STUDY/votes.sqlite      invitations and votes
"""

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, StringConstraints, field_validator

from shards.base.config import Config
from shards.base.durable import create_file, make_folder, read_sealed_json, sealed_json, write_file
from shards.base.errors import RequestError, WorkError

VERSION = 1
RECORD, SECRET, PICTURES = "protocol.json", "secret", "pictures"
Text = Annotated[str, StringConstraints(min_length=1, max_length=2000)]
QUESTIONS: dict[str, Text] = {
    "quality": "Which picture is of better quality?",
    "alignment": "Which picture fits the text better?",
}


class GoldConfig(Config):
    """Items whose better picture is known: they tell raters who look from those who click."""

    share: float = Field(0.05, le=0.5)
    """Of a rater's items, rounded, at least one; above 0: there is no study without."""
    file: Path | None = None
    """A CSV with columns prompt, better, worse: paths from its own folder; null: the worse one is of another prompt,
    and coarse."""
    exclude_below: float | None = Field(0.75, gt=0, le=1)
    """Raters who answer a smaller share of gold questions right are left out of the result; null: nobody is."""

    @field_validator("share")
    @classmethod
    def _some(cls, share: float) -> float:
        if share <= 0:
            raise ValueError(
                "a study without gold cannot tell raters who look from those who click. Take a share above 0, such as "
                "0.05; to leave nobody out, set exclude_below to null"
            )
        return share


class ProtocolConfig(Config):
    """What is asked, and how votes are counted. Another protocol is another study."""

    name: Text = "Which picture is better?"
    """The page's title."""
    questions: dict[str, Text] = Field(QUESTIONS, min_length=1)
    """Short name → what raters read; each is asked on its own."""
    raters: int = Field(15, ge=2)
    """How many are invited."""
    votes_per_item: int = Field(5, ge=1)
    """How many raters see an item."""
    repeats: float = Field(0.1, ge=0, le=0.5)
    """Share of a rater's items that is shown again with its sides swapped; only the first vote counts."""
    gold: GoldConfig = GoldConfig()
    margin: float = Field(0.1, gt=0, lt=0.5)
    """Models are equivalent if the preference is shown to be within a half ± this."""
    seed: int = Field(0, ge=0, lt=2**63)
    """With the secret it keys who sees what, in which order, on which side."""


@dataclass(frozen=True)
class Item:
    """Two pictures of one prompt."""

    id: str
    prompt_id: str
    prompt: str
    category: str | None
    models: tuple[int, int] | None
    """Numbers of the two pictures' models; None of gold, whose first picture is the better one."""
    pictures: tuple[str, str]


@dataclass(frozen=True)
class Protocol:
    """A study, but for its votes."""

    name: str
    questions: dict[str, str]
    raters: int
    votes_per_item: int
    repeats: float
    gold_share: float
    exclude_below: float | None
    margin: float
    seed: int
    secret_sha256: str
    models: list[dict[str, Any]]
    """Where each one's sample set was, and what names it."""
    items: list[Item]
    gold: list[Item]

    def as_json(self) -> dict[str, Any]:
        in_order = [[name, text] for name, text in self.questions.items()]  # JSON's keys are sorted
        return {"version": VERSION, **asdict(self), "questions": in_order}

    @property
    def sha256(self) -> str:
        """The seal of protocol.json: what is published before the first vote, and kept beside the votes."""
        return hashlib.sha256(sealed_json(self.as_json())).hexdigest()

    @property
    def letters(self) -> list[str]:
        """Short names of the models: A, B, …"""
        return [chr(ord("A") + number) for number in range(len(self.models))]


@dataclass(frozen=True)
class Study:
    """A folder with a protocol, its secret, and all of its pictures."""

    folder: Path
    protocol: Protocol
    secret: bytes

    def picture(self, name: str) -> bytes:
        """A picture's file.

        Raises:
            WorkError: it is missing, or is not the one that was prepared.
        """
        path = self.folder / PICTURES / name
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            data = b""
        if picture_name(self.secret, data) != name:
            raise WorkError(
                f"{path} is {'missing' if not data else 'damaged'}. Restore it from a copy; or prepare the same study "
                f"again with the same command, which writes what is missing."
            )
        return data


def picture_name(secret: bytes, data: bytes) -> str:
    """A file's name, which without the secret says nothing of its content."""
    return hmac.digest(secret, b"picture" + hashlib.sha256(data).digest(), "sha256").hex()[:32] + ".png"


def read_study(folder: Path) -> Study:
    """A prepared study.

    Raises:
        RequestError: there is none, or it is of a later version.
        DamagedFile: its protocol was changed.
        WorkError: the secret is missing, or is another study's.
    """
    try:
        content = read_sealed_json(folder / RECORD)
    except FileNotFoundError:
        raise RequestError(
            f"{folder} is no study: it has no {RECORD}. Prepare one: make study A=SAMPLES B=SAMPLES OUT={folder}."
        ) from None
    if (version := content.pop("version")) != VERSION:
        raise RequestError(
            f"{folder} was prepared by a later version of latentmill (protocol {version}; this one knows {VERSION}). "
            f"Use that version."
        )
    for name in ("items", "gold"):
        content[name] = [_item(item) for item in content[name]]
    protocol = Protocol(**content | {"questions": dict(content["questions"])})
    path = folder / SECRET
    secret = path.read_bytes() if path.is_file() else b""
    if hashlib.sha256(secret).hexdigest() != protocol.secret_sha256:
        raise WorkError(
            f"{path} is not the secret that the study was prepared with: without it nobody knows which side a model "
            f"was on. Restore it from a copy."
        )
    return Study(folder, protocol, secret)


def check_pictures(study: Study) -> None:
    """Read every picture.

    Raises:
        WorkError: some are missing or damaged; the first is named.
    """
    for name in sorted(pictures_of([*study.protocol.items, *study.protocol.gold])):
        study.picture(name)


def pictures_of(items: Iterable[Item]) -> set[str]:
    return {name for item in items for name in item.pictures}


def make_secret(folder: Path) -> bytes:
    """The folder's secret; a new one where there is none."""
    path = folder / SECRET
    make_folder(folder)
    if not path.exists():
        temporary = folder / f".{SECRET}.{secrets.token_hex(4)}"
        temporary.touch(mode=0o600)
        create_file(path, write_file(temporary, secrets.token_bytes(32)))
    return path.read_bytes()


def _item(fields: dict[str, Any]) -> Item:
    models, pictures = fields.pop("models"), fields.pop("pictures")
    return Item(**fields, models=tuple(models) if models else None, pictures=tuple(pictures))
