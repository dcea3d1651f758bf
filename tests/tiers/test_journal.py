"""The journal follows what it is told, never makes its caller wait, and is never believed when it is damaged."""

from __future__ import annotations

import random
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headwater.tiers import journal as module
from headwater.tiers.journal import Journal, UnreadableError, remove
from headwater.tiers.recovery import recovered
from headwater.types import HitRule, Identity
from tests.node.conftest import eventually
from tests.tiers.disks import LARGE, SMALL, chain, chunk, origin

SLOT = 12288
ABOUT = "slabs of 65536 bytes, codec none"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal-1.db"


@pytest.fixture
def journal(path: Path) -> Iterator[Journal]:
    """A new journal."""
    path.touch()
    it = Journal(path, ABOUT, create=True)
    it.replace([])
    yield it
    it.close()


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    yield
    assert not [it.name for it in threading.enumerate() if it.name == "headwater-journal"]


def note(number: int, identity: Identity, slot_bytes: int = SLOT) -> tuple[int, int, Identity]:
    return number * SLOT, slot_bytes, identity


def written(path: Path) -> dict[int, Identity]:
    """What a restart finds: place by place, oldest first."""
    it = Journal(path, ABOUT, create=False)
    try:
        rows = it.rows()
        assert rows["age"].tolist() == sorted(rows["age"].tolist())
        return {found.place: found.identity for found in recovered(rows, it.origins)}
    finally:
        it.close()


class Flaky:
    """A database connection that fails its next calls."""

    def __init__(self, database: sqlite3.Connection, *errors: Exception | None) -> None:
        self._database, self._errors = database, list(errors)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._database, name)

    def execute(self, *arguments: Any) -> sqlite3.Cursor:
        """Fail, or run a statement."""
        return self._next(self._database.execute, arguments)

    def executemany(self, *arguments: Any) -> sqlite3.Cursor:
        """Fail, or run a statement many times."""
        return self._next(self._database.executemany, arguments)

    def _next(self, call: Callable[..., sqlite3.Cursor], arguments: tuple[Any, ...]) -> sqlite3.Cursor:
        error = self._errors.pop(0) if self._errors else None
        if error is not None:
            raise error
        return call(*arguments)


# ---- it follows --------------------------------------------------------------------------------------------


def test_what_was_said_last_of_a_place_counts(path: Path, journal: Journal) -> None:
    one, two, three = chain(3)
    journal.stored([note(0, one), note(1, two)])
    journal.removed([0, 77 * SLOT])
    journal.stored([note(2, three)])
    journal.stored([note(1, three), note(2, two)])
    journal.close()
    assert written(path) == {SLOT: three, 2 * SLOT: two}


def test_identities_come_back_whole_and_without_their_salt(path: Path, journal: Journal) -> None:
    hybrid = origin(3, "t", (HitRule.WINDOW, HitRule.ALL))
    chunks = [*chain(3), *chain(2, LARGE), chunk("h", hybrid, group=1)]
    for number, it in enumerate(chunks):
        journal.stored([note(number, it)])
        journal.flush()
    journal.close()
    assert b"secret" not in path.read_bytes()
    found = list(written(path).values())
    assert found == chunks
    assert [it.parent for it in found] == [it.parent for it in chunks]
    assert [it.origin for it in found] == [it.origin for it in chunks]


def test_ages_go_on_after_a_restart(path: Path, journal: Journal) -> None:
    chunks = chain(30)
    journal.stored([note(number, it) for number, it in enumerate(chunks[:10])])
    journal.close()
    for life in (1, 2):
        again = Journal(path, ABOUT, create=False)
        again.stored([note(10 * life + at, it) for at, it in enumerate(chunks[10 * life : 10 * life + 10])])
        again.stored([note(0, chunks[0])])
        again.close()
    assert list(written(path).values()) == [*chunks[1:], chunks[0]]


def test_a_batch_is_one_transaction(path: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    transactions = []
    real = Journal._write

    def counted(self: Journal, batch: Mapping[int, Any]) -> None:
        transactions.append(len(batch))
        real(self, dict(batch))

    monkeypatch.setattr(Journal, "_write", counted)
    chunks = chain(2000)
    for number, it in enumerate(chunks):
        journal.stored([note(number, it)])
    assert journal.flush()
    assert sum(transactions) == 2000
    assert len(transactions) <= 5 + 2000 // module.BATCH, transactions


def test_a_batch_is_written_soon_without_being_asked(journal: Journal) -> None:
    journal.stored([note(0, chunk("x"))])
    eventually(lambda: len(journal.rows()) == 1)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("stored"), st.integers(0, 9), st.integers(0, 20)),
            st.tuples(st.just("removed"), st.integers(0, 9), st.just(0)),
            st.tuples(st.sampled_from(["flush", "restart"]), st.just(0), st.just(0)),
        ),
        max_size=40,
    )
)
def test_it_is_a_dictionary(tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int]]) -> None:
    path = tmp_path_factory.mktemp("j") / "journal"
    path.touch()
    it = Journal(path, ABOUT, create=True)
    it.replace([])
    model: dict[int, Identity] = {}
    for verb, place, name in steps:
        if verb == "stored":
            identity = chunk(name, LARGE if name % 2 else SMALL)
            model.pop(place * SLOT, None)
            model[place * SLOT] = identity
            it.stored([note(place, identity)])
        elif verb == "removed":
            model.pop(place * SLOT, None)
            it.removed([place * SLOT])
        elif verb == "flush":
            assert it.flush()
        else:
            it.close()
            it = Journal(path, ABOUT, create=False)
    it.close()
    assert list(written(path).items()) == list(model.items())


# ---- it does not stand in the way --------------------------------------------------------------------------


def test_a_database_that_does_not_answer_delays_nobody_and_stays_bounded(
    path: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PENDING_MAX", 100)
    with journal._using:  # as if a write hung
        chunks = chain(300)
        journal.stored([note(0, chunks[0])])
        eventually(lambda: journal._busy)
        for number, it in enumerate(chunks):
            journal.stored([note(number, it)])
        assert not journal.flush(0.01)
        assert journal.forgotten == 200
        assert sum(it is not None for it in journal._pending.values()) == 100
    journal.close()
    assert len(written(path)) == 100, "the others are forgotten, not wrong"


def test_errors_are_tried_again(path: Path, journal: Journal) -> None:
    errors = [sqlite3.OperationalError("disk I/O error"), None, None, sqlite3.OperationalError("disk is full")]
    journal._database = Flaky(journal._database, *errors)  # type: ignore[assignment]
    journal.stored([note(0, chunk("a", LARGE))])
    assert journal.flush(20)
    assert journal.failures == 2
    journal.stored([note(1, chunk("b", LARGE))])
    journal.close()
    assert list(written(path).values()) == [chunk("a", LARGE), chunk("b", LARGE)]


@pytest.mark.parametrize("nth", range(8))
def test_the_nth_statement_fails_for_all_n(path: Path, journal: Journal, nth: int) -> None:
    journal._database = Flaky(  # type: ignore[assignment]
        journal._database, *[None] * nth, sqlite3.OperationalError("disk I/O error")
    )
    journal.stored([note(0, chunk("a")), note(1, chunk("b", LARGE))])
    journal.flush(20)
    journal.removed([0])
    journal.stored([note(2, chunk("c"))])
    assert journal.flush(20)
    journal.close()
    assert set(written(path).values()) == {chunk("b", LARGE), chunk("c")}


def test_a_journal_that_turns_out_damaged_is_given_up(path: Path, journal: Journal) -> None:
    journal._database = Flaky(journal._database, sqlite3.DatabaseError("malformed"))  # type: ignore[assignment]
    journal.stored([note(0, chunk("a"))])
    assert not journal.flush(20)
    assert journal.broken
    assert not path.exists(), "so that the next start looks at the slots"
    journal.stored([note(1, chunk("b"))])
    journal.removed([0])
    journal.close()


def test_what_cannot_be_written_at_the_end_is_lost_in_time(path: Path, journal: Journal) -> None:
    journal._database = Flaky(  # type: ignore[assignment]
        journal._database, *[sqlite3.OperationalError("disk I/O error")] * 1000
    )
    journal.stored([note(0, chunk("a"))])
    journal.close(10)
    assert written(path) == {}


# ---- it is not believed when it is damaged -----------------------------------------------------------------


def filled(path: Path) -> None:
    path.touch()
    it = Journal(path, ABOUT, create=True)
    it.replace([note(number, each) for number, each in enumerate([*chain(300), *chain(20, LARGE)])])
    it.close()


def test_another_format_or_other_files_are_refused(path: Path) -> None:
    filled(path)
    with pytest.raises(UnreadableError, match="is about"):
        Journal(path, ABOUT.replace("none", "aes-256-gcm"), create=False)
    database = sqlite3.connect(path)
    database.execute("PRAGMA user_version=2")
    database.close()
    with pytest.raises(UnreadableError, match="not a journal of format 1"):
        Journal(path, ABOUT, create=False)


def test_a_journal_that_was_not_finished_is_refused(path: Path) -> None:
    path.touch()
    Journal(path, ABOUT, create=True).close()
    with pytest.raises(UnreadableError, match="is about"):
        Journal(path, ABOUT, create=False)


@pytest.mark.parametrize("content", [b"", b"x", bytes(8192), b"SQLite format 3\0" + bytes(5000)])
def test_what_is_no_database_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(UnreadableError):
        Journal(path, ABOUT, create=False)


def test_any_damage_to_its_file_is_refused_or_harmless(path: Path, seed: int) -> None:
    """Whatever comes back has the form of what was written; that it is not there is found out by reading it."""
    filled(path)
    whole = path.read_bytes()
    rng = random.Random(seed)
    refused = 0
    for number in range(150):
        remove(path)
        raw = bytearray(whole)
        if number % 3 == 0:
            at = rng.randrange(len(raw))
            raw[at] ^= 1 << rng.randrange(8)
        elif number % 3 == 1:
            at = rng.randrange(len(raw) - 64)
            raw[at : at + 64] = rng.randbytes(64)
        else:
            del raw[rng.randrange(len(raw)) :]
        path.write_bytes(raw)
        try:
            it = Journal(path, ABOUT, create=False)
        except UnreadableError:
            refused += 1
            continue
        try:
            rows = it.rows()
            assert len(rows) <= 400
            assert set(it.origins.values()) <= {SMALL, LARGE}, f"seed {seed}: an origin that nobody wrote"
        except UnreadableError:
            refused += 1
        finally:
            it.close()
    assert 50 <= refused < 150
