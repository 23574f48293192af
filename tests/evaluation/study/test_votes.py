"""The database of votes, which never changes or loses a row."""

import sqlite3
from contextlib import closing, suppress
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from evaluation.study.protocol import Study, read_study
from evaluation.study.votes import VERSION, open_votes
from shards.base.errors import RequestError, WorkError
from tests.evaluation.study.studies import make_study
from tests.ranks import SERVER

BOTH = {"quality": "first", "alignment": "tie"}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return make_study(tmp_path_factory.mktemp("votes"))


@pytest.fixture
def study(prepared: Study, tmp_path: Path) -> Study:
    """A study without votes."""
    return replace(prepared, folder=tmp_path)


def test_a_vote_is_stored_once_and_the_first_one_counts(study: Study) -> None:
    with open_votes(study) as votes:
        assert votes.cast(1, 1, BOTH, "a", 1.5) == BOTH
        assert votes.cast(1, 1, BOTH, "a", 1.5) == BOTH
        assert votes.cast(1, 1, {"quality": "second", "alignment": "second"}, "b", 2.0) == BOTH
        assert votes.cast(2, 1, BOTH, "c", 1.0) == BOTH
    with open_votes(study) as votes:
        assert [(vote.rater, vote.showing, vote.question, vote.answer) for vote in votes.all()] == [
            (rater, 1, question, answer) for rater in (1, 2) for question, answer in BOTH.items()
        ]
        assert votes.num_done(1) == 1 and votes.num_done(0) == 0
        pragmas = [votes._db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous")]
        assert pragmas == ["wal", 2]  # durable


def test_no_connection_can_change_or_delete_rows(study: Study) -> None:
    with open_votes(study) as votes:
        votes.cast(0, 1, BOTH, "a", 1.0)
        votes.invite(0)
        before = votes.all()
    with closing(sqlite3.connect(study.folder / "votes.sqlite")) as db:
        for statement in (
            "UPDATE votes SET answer = 'second'",
            "DELETE FROM votes",
            "DELETE FROM invitations",
            "UPDATE invitations SET rater = 9",
            "UPDATE study SET protocol_sha256 = 'x'",
            "INSERT INTO votes VALUES (9, 0, 2, 'q', 'left', 'x', 1, '')",
        ):
            with pytest.raises(sqlite3.IntegrityError, match=r"is append-only|CHECK"), db:
                db.execute(statement)
        with db:
            db.execute("INSERT OR REPLACE INTO votes VALUES (1, 0, 1, 'quality', 'second', 'x', 1, '')")
    with open_votes(study) as votes:
        assert votes.all() == before


def test_invitations_are_stored_as_hashes_and_a_new_one_replaces_the_old_one(study: Study) -> None:
    with open_votes(study) as votes:
        first, other = votes.invite(0), votes.invite(1)
        assert len(first) >= 32 and votes.rater_of(first) == 0 and votes.rater_of(other) == 1
        assert votes.rater_of("") is None and votes.rater_of(first[:-1]) is None
        again = votes.invite(0)
        assert votes.rater_of(first) is None and votes.rater_of(again) == 0
        assert votes.invited() == {0, 1}
    stored = b"".join(path.read_bytes() for path in study.folder.glob("votes.sqlite*"))
    assert not any(token.encode() in stored for token in (first, other, again))


def refusal(study: Study, error: type[Exception], message: str) -> None:
    """Check that the votes of a study cannot be opened."""
    with pytest.raises(error, match=message), open_votes(study):
        pass


def test_other_and_damaged_databases_are_rejected(study: Study) -> None:
    with open_votes(study) as votes:
        votes.cast(0, 1, BOTH, "a", 1.0)
    changed = replace(study, protocol=replace(study.protocol, secret_sha256="another"))
    refusal(changed, RequestError, r"belongs to a different protocol: .* Changing the protocol requires")
    path = study.folder / "votes.sqlite"
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version = {VERSION + 1}")
    refusal(study, RequestError, r"votes\.sqlite has format version 2, but this version of")
    path.write_bytes(b"no database" * 100)
    refusal(study, WorkError, "cannot be used: file is not a database")


def cast_forever(folder: Path, acknowledge: Connection) -> None:
    """Cast votes, and acknowledge each."""
    with open_votes(read_study(folder)) as votes:
        for showing in range(1, 10**6):
            votes.cast(0, showing, BOTH, str(showing), 1.0)
            acknowledge.send(showing)


def test_acknowledged_votes_survive_a_kill(tmp_path: Path) -> None:
    study = make_study(tmp_path)
    receiver, sender = Pipe(duplex=False)
    process = SERVER.Process(target=cast_forever, args=(study.folder, sender))
    process.start()
    sender.close()
    acknowledged = [receiver.recv() for _ in range(50)]
    process.kill()
    process.join()
    with suppress(EOFError, OSError):
        while True:
            acknowledged.append(receiver.recv())
    with open_votes(study) as votes:
        kept = votes.all()
    assert {vote.showing for vote in kept} >= set(acknowledged)
    assert len(kept) == 2 * len({vote.showing for vote in kept})  # both answers or neither
