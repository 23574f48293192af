"""The database of votes, which never changes or loses a row."""

import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from evaluation.study.protocol import Study
from evaluation.study.votes import VERSION, open_votes
from shards.base.errors import RequestError, WorkError
from tests.evaluation.study.studies import make_study
from tests.runs import environment

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


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE votes SET answer = 'second'",
        "DELETE FROM votes",
        "DELETE FROM invitations",
        "UPDATE invitations SET rater = 9",
        "UPDATE study SET protocol_sha256 = 'x'",
        "INSERT INTO votes VALUES (9, 0, 2, 'q', 'left', 'x', 1, '')",
    ],
)
def test_no_connection_can_change_or_delete_rows(study: Study, statement: str) -> None:
    with open_votes(study) as votes:
        votes.cast(0, 1, BOTH, "a", 1.0)
        votes.invite(0)
        before = votes.all()
    with closing(sqlite3.connect(study.folder / "votes.sqlite")) as db:
        with pytest.raises(sqlite3.IntegrityError, match=r"is append-only|CHECK"), db:
            db.execute(statement)
        replaced = "INSERT OR REPLACE INTO votes VALUES (1, 0, 1, 'quality', 'second', 'x', 1, '')"
        with db:
            db.execute(replaced)
    with open_votes(study) as votes:
        assert votes.all() == before


def test_the_database_is_durable(study: Study) -> None:
    with open_votes(study) as votes:
        db = votes._db
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert db.execute("PRAGMA synchronous").fetchone() == (2,)


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


def test_votes_of_a_different_protocol_are_rejected(study: Study) -> None:
    with open_votes(study):
        pass
    changed = replace(study, protocol=replace(study.protocol, margin=0.2))
    with (
        pytest.raises(RequestError, match=r"belongs to a different protocol .* Changing the protocol requires"),
        open_votes(changed),
    ):
        pass


def test_a_database_of_a_different_version_is_rejected(study: Study) -> None:
    with open_votes(study) as votes:
        votes.cast(0, 1, BOTH, "a", 1.0)
    path = study.folder / "votes.sqlite"
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version = {VERSION + 1}")
    with (
        pytest.raises(RequestError, match=r"votes\.sqlite has format version 2, but this version of"),
        open_votes(study),
    ):
        pass


def test_a_damaged_database_is_reported(study: Study) -> None:
    (study.folder / "votes.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(WorkError, match="cannot be used: file is not a database"), open_votes(study):
        pass


WRITER = """
import sys
from pathlib import Path
from evaluation.study.protocol import read_study
from evaluation.study.votes import open_votes
with open_votes(read_study(Path(sys.argv[1]))) as votes:
    for showing in range(1, 10**6):
        votes.cast(0, showing, {"quality": "first", "alignment": "tie"}, str(showing), 1.0)
        print(showing, flush=True)
"""


def test_acknowledged_votes_survive_a_kill(tmp_path: Path) -> None:
    study = make_study(tmp_path)
    command = [sys.executable, "-c", WRITER, str(study.folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        assert process.stdout is not None
        for _ in range(50):
            process.stdout.readline()
        os.kill(process.pid, signal.SIGKILL)
        acknowledged = 50 + len(process.stdout.read().splitlines())
    with open_votes(study) as votes:
        kept = votes.all()
    assert len({vote.showing for vote in kept}) >= acknowledged
    assert len(kept) == 2 * len({vote.showing for vote in kept})  # both answers or neither
