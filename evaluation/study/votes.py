"""Invitations and votes, stored in an append-only SQLite database that uses WAL mode and is flushed at every commit."""

import hashlib
import secrets
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from evaluation.study.protocol import Study
from shards.base.durable import check_version
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
        f"BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END"
        for table in ("study", "invitations", "votes")
        for action in ("UPDATE", "DELETE")
    ),
    f"PRAGMA user_version = {VERSION}",
)


@dataclass(frozen=True)
class Vote:
    """One rater's answer to one question in one trial."""

    rater: int
    showing: int
    question: str
    answer: str
    """`first`, `second` or `tie`, in the order in which the page showed the images."""
    seconds: float
    """Time since the images appeared, by the rater's clock."""


class Votes:
    """A connection to a study's database, for use by one thread."""

    def __init__(self, connection: sqlite3.Connection, path: Path):
        self._db = connection
        self._path = path

    def invite(self, rater: int) -> str:
        """Create an invitation token for a rater (counting from 0), and invalidate the rater's earlier tokens."""
        with self._transaction():
            return self._add_invitation(rater)

    def invite_more(self, count: int, num_raters: int) -> dict[int, str]:
        """Create invitation tokens for the first `count` raters below `num_raters` who have not been invited.

        One transaction chooses the raters and stores their invitations, so concurrent calls invite different raters.

        Returns:
            Rater → token. It is empty, and nobody is invited, if fewer than `count` raters are left.
        """
        with self._transaction():
            waiting = sorted(set(range(num_raters)) - self.invited())
            chosen = waiting[:count] if 0 < count <= len(waiting) else []
            return {rater: self._add_invitation(rater) for rater in chosen}

    def _add_invitation(self, rater: int) -> str:
        """Store an invitation within the current transaction, and return its token."""
        token = secrets.token_urlsafe(TOKEN_BYTES)
        values = (rater, _sha256(token), _now())
        self._db.execute("INSERT INTO invitations (rater, token_sha256, at) VALUES (?, ?, ?)", values)
        return token

    def invited(self) -> set[int]:
        """Return the raters who have been invited."""
        return {rater for (rater,) in self._db.execute("SELECT DISTINCT rater FROM invitations")}

    def rater_of(self, token: str) -> int | None:
        """Return the rater to whom a token belongs, or None if the token is unknown or has been replaced."""
        newest = "SELECT MAX(id) FROM invitations GROUP BY rater"
        query = f"SELECT rater FROM invitations WHERE id IN ({newest}) AND token_sha256 = ?"
        found = self._db.execute(query, (_sha256(token),)).fetchone()
        return None if found is None else int(found[0])

    def cast(self, rater: int, showing: int, answers: Mapping[str, str], vote: str, seconds: float) -> dict[str, str]:
        """Durably store a rater's answers for one trial, unless the rater has already answered it.

        Returns:
            Question → the answer that counts, which may be an earlier one.
        """
        rows = [(rater, showing, question, answer, vote, seconds, _now()) for question, answer in answers.items()]
        names = "rater, showing, question, answer, vote, seconds, at"
        with self._transaction():
            self._db.executemany(f"INSERT INTO votes ({names}) VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
        kept = "SELECT question, answer FROM votes WHERE rater = ? AND showing = ?"
        return dict(self._db.execute(kept, (rater, showing)).fetchall())

    def num_done(self, rater: int) -> int:
        """Return the number of trials in which a rater has voted."""
        done = self._db.execute("SELECT COUNT(DISTINCT showing) FROM votes WHERE rater = ?", (rater,)).fetchone()
        return int(done[0])

    def all(self) -> list[Vote]:
        """Return all votes in the order in which they were cast."""
        rows = self._db.execute("SELECT rater, showing, question, answer, seconds FROM votes ORDER BY id")
        return [Vote(*row) for row in rows]

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            with self._db:
                yield
        except sqlite3.OperationalError as error:  # for example, a full disk or a lock held by another process
            raise WorkError(
                f"{self._path} cannot be written: {error}. Earlier votes are kept. Free disk space, or stop any other "
                f"program that has locked the file."
            ) from error


@contextmanager
def open_votes(study: Study) -> Iterator[Votes]:
    """Open a study's votes. Create the database if it does not exist.

    Raises:
        RequestError: the database belongs to a different protocol, or has a different format version.
        WorkError: the database is damaged or locked.
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
            f"{path} cannot be used: {error}. If another program has locked it, stop that program. If it is damaged, "
            f"restore it from a backup."
        ) from error


def _begin(db: sqlite3.Connection, study: Study, path: Path) -> None:
    """Create the tables if the database is new, and check that it belongs to this study."""
    sha256 = study.protocol.sha256
    db.execute("BEGIN IMMEDIATE")
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version:
        check_version(version, VERSION, str(path))
    else:
        for statement in SCHEMA:
            db.execute(statement)
        db.execute("INSERT INTO study VALUES (?, ?)", (sha256, _now()))
    (recorded,) = db.execute("SELECT protocol_sha256 FROM study").fetchone()
    db.execute("COMMIT")
    if recorded != sha256:
        raise RequestError(
            f"{path} belongs to a different protocol: it was created with the protocol {recorded[:12]}…, but "
            f"{study.folder} now has {sha256[:12]}…. Changing the protocol requires a new study. Restore the original "
            f"protocol, or prepare the new one in another folder."
        )


def _sha256(token: str) -> str:
    return hashlib.sha256(as_bytes(token)).hexdigest()


def as_bytes(text: str) -> bytes:
    """Encode text from a client, which may contain invalid UTF-8."""
    return text.encode(errors="surrogateescape")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
