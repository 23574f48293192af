"""Invitations and votes: an SQLite file in WAL mode, flushed at every commit. Nothing in it is changed or removed."""

import hashlib
import secrets
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from evaluation.study.protocol import Study
from shards.base.errors import RequestError, WorkError

FILE = "votes.sqlite"
VERSION = 1
TOKEN_BYTES = 24
WAIT_SECONDS = 10.0
SCHEMA = (
    "CREATE TABLE study (protocol_sha256 TEXT NOT NULL, at TEXT NOT NULL)",
    """CREATE TABLE invitations (
        id INTEGER PRIMARY KEY, rater INTEGER NOT NULL, token_sha256 TEXT NOT NULL UNIQUE, at TEXT NOT NULL
    )""",
    """CREATE TABLE votes (
        id INTEGER PRIMARY KEY, rater INTEGER NOT NULL, showing INTEGER NOT NULL, question TEXT NOT NULL,
        answer TEXT NOT NULL CHECK (answer IN ('first', 'second', 'tie')), vote TEXT NOT NULL, seconds REAL NOT NULL,
        at TEXT NOT NULL, UNIQUE (rater, showing, question)
    )""",
    """CREATE TRIGGER votes_once BEFORE INSERT ON votes WHEN EXISTS (
        SELECT 1 FROM votes WHERE rater = NEW.rater AND showing = NEW.showing AND question = NEW.question
    ) BEGIN SELECT RAISE(IGNORE); END""",
    *(
        f"CREATE TRIGGER {table}_no_{action} BEFORE {action} ON {table} "
        f"BEGIN SELECT RAISE(ABORT, 'of {table} nothing is changed or removed'); END"
        for table in ("study", "invitations", "votes")
        for action in ("UPDATE", "DELETE")
    ),
    f"PRAGMA user_version = {VERSION}",
)


@dataclass(frozen=True)
class Vote:
    rater: int
    showing: int
    question: str
    answer: str
    """first, second, or tie: as the page showed them."""
    seconds: float
    """Since the pictures were shown, by the rater's own clock."""


class Votes:
    """A study's database. One connection, for one thread."""

    def __init__(self, connection: sqlite3.Connection, path: Path):
        self._db = connection
        self._path = path

    def invite(self, rater: int) -> str:
        """A new link's token for a rater, counted from 0; one that the rater had before is void."""
        token = secrets.token_urlsafe(TOKEN_BYTES)
        with self._transaction():
            values = (rater, _hashed(token), _now())
            self._db.execute("INSERT INTO invitations (rater, token_sha256, at) VALUES (?, ?, ?)", values)
        return token

    def invited(self) -> set[int]:
        """Raters who have a link."""
        return {rater for (rater,) in self._db.execute("SELECT DISTINCT rater FROM invitations")}

    def rater_of(self, token: str) -> int | None:
        """Whose token it is; None where it is nobody's, or void."""
        newest = (
            "SELECT rater, token_sha256 FROM invitations WHERE id IN (SELECT MAX(id) FROM invitations GROUP BY rater)"
        )
        found = self._db.execute(f"SELECT rater FROM ({newest}) WHERE token_sha256 = ?", (_hashed(token),)).fetchone()
        return None if found is None else int(found[0])

    def cast(self, rater: int, showing: int, answers: Mapping[str, str], vote: str, seconds: float) -> dict[str, str]:
        """Add the answers to a showing's questions, on the disk once this returns; what was voted before stays.

        Returns:
            The answers that count: these, or the earlier ones.
        """
        rows = [(rater, showing, question, answer, vote, seconds, _now()) for question, answer in answers.items()]
        with self._transaction():
            self._db.executemany(
                "INSERT INTO votes (rater, showing, question, answer, vote, seconds, at) VALUES (?, ?, ?, ?, ?, ?, ?)",
                rows,
            )
        kept = "SELECT question, answer FROM votes WHERE rater = ? AND showing = ?"
        return dict(self._db.execute(kept, (rater, showing)).fetchall())

    def num_done(self, rater: int) -> int:
        """How many showings a rater has voted on."""
        done = self._db.execute("SELECT COUNT(DISTINCT showing) FROM votes WHERE rater = ?", (rater,)).fetchone()
        return int(done[0])

    def all(self) -> list[Vote]:
        """Every vote, in the order in which they were given."""
        rows = self._db.execute("SELECT rater, showing, question, answer, seconds FROM votes ORDER BY id")
        return [Vote(*row) for row in rows]

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            with self._db:
                yield
        except sqlite3.OperationalError as error:  # a full disk, another process that holds it
            raise WorkError(f"{self._path} cannot be written: {error}. What was voted before is kept.") from error


@contextmanager
def open_votes(study: Study) -> Iterator[Votes]:
    """A study's votes; an empty file of them where there is none.

    Raises:
        RequestError: they were given under another protocol, or are of a later version.
        WorkError: the file is damaged.
    """
    path = study.folder / FILE
    try:
        with closing(sqlite3.connect(path, timeout=WAIT_SECONDS, isolation_level=None)) as db:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = FULL")
            _begin(db, study, path)
            yield Votes(db, path)
    except sqlite3.DatabaseError as error:
        if isinstance(error, sqlite3.IntegrityError | sqlite3.ProgrammingError):
            raise
        raise WorkError(
            f"{path} cannot be used: {error}. If another program holds it, end that; if it is damaged, restore a copy."
        ) from error


def _begin(db: sqlite3.Connection, study: Study, path: Path) -> None:
    sha256 = study.protocol.sha256
    db.execute("BEGIN IMMEDIATE")
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version > VERSION:
        raise RequestError(
            f"{path} was written by a later version of latentmill (votes {version}; this one knows {VERSION}). Use "
            f"that one: this one could count its votes wrongly."
        )
    if not version:
        for statement in SCHEMA:
            db.execute(statement)
        db.execute("INSERT INTO study VALUES (?, ?)", (sha256, _now()))
    (begun,) = db.execute("SELECT protocol_sha256 FROM study").fetchone()
    db.execute("COMMIT")
    if begun != sha256:
        raise RequestError(
            f"{path} was begun under another protocol ({begun[:12]}…; {study.folder} now has {sha256[:12]}…). A "
            f"changed protocol is another study: restore the one that votes were given under, or prepare the new one "
            f"in another folder."
        )


def _hashed(token: str) -> str:
    return hashlib.sha256(as_bytes(token)).hexdigest()


def as_bytes(text: str) -> bytes:
    """What a client sent, which may be no UTF-8."""
    return text.encode(errors="surrogateescape")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
