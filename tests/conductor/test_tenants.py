"""Who may ask and how much: keys, their rotation and their timing; quotas that several processes share; salts."""

from __future__ import annotations

import hmac
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.conductor import tenants as module
from headwater.conductor.quota_page import DEBT_S, LOCK_S, QuotaPage
from headwater.conductor.tenants import AUTHORIZATION_BYTES, KeyedTenants, key_row, new_key
from headwater.errors import ConfigError, ResourceError
from headwater.fleetfile.model import TenantSpec
from tests.conftest import ROOT
from tests.node.conftest import eventually

SECRET = "a secret of the tests, long enough"
KEYS = [new_key() for _ in range(3)]


@pytest.fixture
def page() -> Iterator[QuotaPage]:
    """A page for three workers, in the parent."""
    made = QuotaPage.create(3)
    yield made
    made.close()


@pytest.fixture
def rows(page: QuotaPage) -> Iterator[list[QuotaPage]]:
    """The same in its three workers."""
    opened = [QuotaPage.open(os.dup(page.descriptor), row) for row in range(3)]
    yield opened
    for it in opened:
        it.close()


def bearer(key: str) -> bytes:
    return b"Bearer " + key.encode()


def spec(name: str = "t", *keys: str, **quotas: int) -> TenantSpec:
    return TenantSpec(name, tuple(map(key_row, keys)), **quotas)  # type: ignore[arg-type]


# ---- keys


def test_keys_are_long_random_and_stored_as_digests() -> None:
    assert len({new_key() for _ in range(100)}) == 100
    key = new_key()
    assert key.startswith("sk-hw-")
    assert len(key) == len("sk-hw-") + 43  # 256 bits, six a letter
    assert key_row(key).startswith("sha256:")
    assert key[6:] not in key_row(key)


def test_two_keys_are_valid_while_they_rotate_and_streams_outlive_theirs(rows: list[QuotaPage]) -> None:
    old, new, other = KEYS
    known = KeyedTenants([spec("a", old, new, concurrency=2), spec("b", other)], rows[0], SECRET)
    a = known.who(bearer(old))
    assert a is not None
    assert a == known.who(bearer(new))
    assert known.who(b"bearer  " + other.encode()) == known.named("b")
    assert known.enter(a, 1.0) is None
    known.replace([spec("a", new, concurrency=1)])
    assert known.who(bearer(old)) is None
    assert known.who(bearer(other)) is None
    again = known.who(bearer(new))
    assert again is not None
    assert known.enter(again, 1.0) is not None  # the new quota, with the old request still there
    known.leave(a)
    assert known.enter(again, 1.0) is None


@pytest.mark.parametrize(
    "given",
    [
        None,
        b"",
        b"Bearer",
        b"Bearer ",
        b"Basic " + KEYS[0].encode(),
        KEYS[0].encode(),
        bearer(KEYS[0])[:-1],
        bearer(KEYS[0]) + b"x",
        bearer(KEYS[0]) + b"\0",
        bearer(KEYS[0].upper()),
        b"Bearer " + key_row(KEYS[0]).encode(),
        b"Bearer \xff\xfe",
        bearer(KEYS[0]) + b" " * AUTHORIZATION_BYTES,
    ],
    ids=itertools.count(),
)
def test_whoever_has_no_key_is_nobody(given: bytes | None, rows: list[QuotaPage]) -> None:
    known = KeyedTenants([spec("a", KEYS[0])], rows[0], SECRET)
    assert known.who(bearer(KEYS[0])) is not None
    assert known.who(given) is None
    assert known.state()["unknown_keys"] == 1


def test_a_tenant_without_keys_is_nobody(rows: list[QuotaPage]) -> None:
    known = KeyedTenants([spec("a")], rows[0], SECRET)
    assert known.who(None) is None
    assert known.who(b"Bearer ") is None


def test_every_key_is_digested_once_and_compared_once_in_constant_time(
    rows: list[QuotaPage], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = KeyedTenants([spec("a", KEYS[0]), spec("b", KEYS[1])], rows[0], SECRET)
    compared: list[tuple[int, int]] = []
    in_constant_time = hmac.compare_digest

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return in_constant_time(a, b)

    monkeypatch.setattr(module.hmac, "compare_digest", compare)
    digested: list[int] = []
    real = module._digest
    monkeypatch.setattr(module, "_digest", lambda key: digested.append(len(key)) or real(key))
    for key in (KEYS[0], KEYS[1], KEYS[2], KEYS[0][:-1] + "_", KEYS[0][:10]):
        known.who(bearer(key))
    assert compared == [(32, 32)] * 5
    assert digested == [49, 49, 49, 49, 10]


@pytest.mark.parametrize(
    ("tenants", "words"),
    [
        ([TenantSpec("a", ("sha256:short",))], r"tenants\.a\.keys\[0\]: not sha256:HEX"),
        ([TenantSpec("a", (KEYS[0],))], "headwater conductor key"),
        ([spec("a", KEYS[0]), spec("b", KEYS[0])], r"tenants\.b\.keys\[0\]: a has this key already"),
        ([spec("a", KEYS[0]), spec("a", KEYS[1])], "twice"),
        ([spec("", KEYS[0])], "without a name"),
    ],
    ids=["short", "the-key-itself", "shared", "twice", "nameless"],
)
def test_tenants_that_make_no_sense_are_refused_and_repeat_no_key(
    tenants: list[TenantSpec], words: str, rows: list[QuotaPage]
) -> None:
    known = KeyedTenants([spec("old", KEYS[2])], rows[0], SECRET)
    with pytest.raises(ConfigError, match=words) as raised:
        known.replace(tenants)
    assert not any(key in str(raised.value) for key in KEYS)
    assert known.who(bearer(KEYS[2])) is not None  # as it was


def test_tenants_need_a_secret_and_do_not_vanish(rows: list[QuotaPage]) -> None:
    with pytest.raises(ConfigError, match="openssl rand"):
        KeyedTenants([spec("a", KEYS[0])], rows[0], "short")
    known = KeyedTenants([spec("a", KEYS[0])], rows[0], SECRET)
    with pytest.raises(ConfigError, match="let everybody in"):
        known.replace([])


def test_without_tenants_everybody_is_the_same_one(rows: list[QuotaPage]) -> None:
    known = KeyedTenants([], rows[0])
    who = known.who(None)
    assert who == known.who(bearer("whatever")) == TenantSpec("")
    assert all(known.enter(who, 0.0) is None for _ in range(1000))
    assert known.state()["rows"][0]["in_progress"] == 1000


# ---- salts


names = st.text(max_size=12)


@given(st.tuples(names.filter(bool), names), st.tuples(names.filter(bool), names))
def test_salts_differ_where_tenant_or_salt_do(one: tuple[str, str], other: tuple[str, str]) -> None:
    page = QuotaPage.create(1)
    specs = [TenantSpec(name) for name in dict.fromkeys((one[0], other[0]))]
    known = KeyedTenants(specs, page, SECRET)
    a, b = (known.salt(TenantSpec(name), salt) for name, salt in (one, other))
    assert (a == b) == (one == other)
    assert len(a) == 64
    elsewhere = KeyedTenants(specs, page, SECRET + "!")
    assert elsewhere.salt(TenantSpec(one[0]), one[1]) != a
    page.close()


def test_a_salt_is_the_same_in_all_processes_and_never_the_clients_own(rows: list[QuotaPage]) -> None:
    one, other = (KeyedTenants([spec("a", KEYS[0])], row, SECRET) for row in rows[:2])
    a = TenantSpec("a")
    assert one.salt(a, "") == other.salt(a, "")
    assert one.salt(TenantSpec("ab"), "c") != one.salt(TenantSpec("a"), "bc")
    assert one.salt(a, "") != ""
    assert one.salt(a, one.salt(a, "")) != one.salt(a, "")
    assert one.salt(a, "\ud800") != one.salt(a, "\udfff")  # JSON may hold these
    alone = KeyedTenants([], rows[2])
    assert (alone.salt(TenantSpec(""), ""), alone.salt(TenantSpec(""), "mine")) == ("", "mine")


# ---- quotas


def test_what_is_in_progress_is_counted_over_all_workers(page: QuotaPage, rows: list[QuotaPage]) -> None:
    a = spec("a", KEYS[0], concurrency=3)
    workers = [KeyedTenants([a, spec("b", KEYS[1])], row, SECRET) for row in rows]
    assert [worker.enter(a, 5.0) for worker in workers] == [None] * 3
    wait = workers[0].take(a, 5.0)
    assert wait is not None
    assert (wait.reason, wait.seconds) == ("concurrency", 1.0)
    assert workers[0].enter(spec("b"), 5.0) is None
    page.clear(2)  # that one died
    assert workers[1].enter(a, 5.0) is None
    assert workers[0].enter(a, 5.0) is not None
    workers[1].leave(a)
    workers[1].leave(a)
    workers[1].leave(a)  # once too often is no credit
    assert [workers[0].enter(a, 5.0) for _ in range(3)] == [None, None, 1.0]
    assert workers[0].state()["rows"][0]["refused"] == {"concurrency": 3}


def test_requests_come_back_one_after_another(rows: list[QuotaPage]) -> None:
    a = spec("a", KEYS[0], requests_per_minute=6)
    one, other = (KeyedTenants([a], row, SECRET) for row in rows[:2])
    now = 100.0
    assert [it.enter(a, now) for it in (one, other) * 3] == [None] * 6
    assert other.enter(a, now) == pytest.approx(10.0)
    assert other.enter(a, now + 4) == pytest.approx(6.0)
    assert one.enter(a, now + 9.99) == pytest.approx(0.01)
    assert one.enter(a, now + 10.0) is None
    assert other.enter(a, now + 10.0) == pytest.approx(10.0)
    assert [other.enter(a, now + 1000) for _ in range(7)] == [None] * 6 + [pytest.approx(10.0)]


def test_tokens_that_were_too_many_are_paid_back_first(rows: list[QuotaPage]) -> None:
    a = spec("a", KEYS[0], tokens_per_minute=600)
    one, other = (KeyedTenants([a], row, SECRET) for row in rows[:2])
    one.used(a, 599, 50.0)
    assert other.enter(a, 50.0) is None
    other.used(a, 601, 50.0)
    assert one.enter(a, 50.0) == pytest.approx(60.1, abs=0.01)  # 600 too many, and one more to be spent
    assert one.enter(a, 111.0) is None
    one.used(a, 10**12, 111.0)
    assert one.enter(a, 111.0) == pytest.approx(DEBT_S - 60 + 0.1)


def test_a_refusal_spends_nothing_and_names_the_longest_wait(rows: list[QuotaPage]) -> None:
    a = spec("a", KEYS[0], requests_per_minute=60, concurrency=1)
    known = KeyedTenants([a], rows[0], SECRET)
    assert known.enter(a, 10.0) is None
    for _ in range(100):
        assert known.enter(a, 10.0) == 1.0
    known.leave(a)
    assert known.enter(a, 10.0) is None  # 59 of the minute's are left


@pytest.mark.parametrize("quota", ["requests_per_minute", "tokens_per_minute", "concurrency"])
def test_a_quota_of_nothing_lets_nothing_in(quota: str, rows: list[QuotaPage]) -> None:
    a = spec("a", KEYS[0], **{quota: 0})
    known = KeyedTenants([a], rows[0], SECRET)
    wait = known.take(a, 1.0)
    assert wait is not None
    assert wait.reason == quota
    assert 0 < wait.seconds <= 60


def test_slots_of_tenants_that_are_gone_are_used_again() -> None:
    page = QuotaPage.create(2, slots=3)
    other = QuotaPage.open(os.dup(page.descriptor), 1)
    names = [f"t{number}" for number in range(10)]
    for number, name in enumerate(names):
        held = spec(name, concurrency=1)
        known = KeyedTenants([held], (page, other)[number % 2], SECRET)
        assert known.enter(held, 1.0) is None
        assert known.enter(held, 1.0) is not None
        known.leave(held)
    busy = KeyedTenants([spec(name, concurrency=1) for name in names], page, SECRET)
    assert [busy.enter(spec(name), 1.0) for name in names[:3]] == [None] * 3
    with pytest.raises(ResourceError, match="more than 3 tenants"):
        busy.enter(spec(names[3]), 1.0)
    busy.leave(spec(names[0]))
    assert busy.enter(spec(names[3]), 1.0) is None
    busy.leave(spec(names[0]))  # it has no slot any more: nobody else's request ends by that
    assert busy.enter(spec(names[3]), 1.0) is not None
    other.close()
    page.close()


def test_a_spent_quota_is_not_forgotten_for_another_tenant() -> None:
    page = QuotaPage.create(1, slots=1)
    known = KeyedTenants([spec("a", requests_per_minute=1), spec("b", requests_per_minute=1)], page, SECRET)
    assert known.enter(spec("a"), 1.0) is None
    known.leave(spec("a"))
    with pytest.raises(ResourceError):
        known.enter(spec("b"), 2.0)
    assert known.enter(spec("a"), 2.0) == pytest.approx(59.0)
    assert known.enter(spec("b"), 62.0) is None
    page.close()


def test_what_is_no_page_is_refused() -> None:
    for size in (0, 8, 4096):
        descriptor = os.memfd_create("none", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, size)
        with pytest.raises(ResourceError, match="no page of quotas"):
            QuotaPage.open(descriptor, 0)
        if size == 0:
            os.close(descriptor)
    with pytest.raises(ResourceError, match="workers"):
        QuotaPage.create(0)


WORKER = """
import sys, time
from headwater.conductor.quota_page import Quota, QuotaPage
page = QuotaPage.open(int(sys.argv[1]), int(sys.argv[2]))
quota = Quota(concurrency=int(sys.argv[3]), requests_per_minute=int(sys.argv[4]))
print("ready", flush=True)
sys.stdin.readline()
taken = 0
for _ in range(int(sys.argv[5])):
    if page.enter("t", quota, float(sys.argv[6])) is None:
        taken += 1
        if sys.argv[7] == "leave":
            page.leave("t")
print(taken, page.careless, flush=True)
sys.stdin.readline()
"""


def workers_of(
    page: QuotaPage, concurrency: int, per_minute: int, tries: int, leave: str
) -> list[subprocess.Popen[str]]:
    """Two processes that wait for a line, try so often, and say how often they were let in."""
    numbers = (concurrency, per_minute, tries, 1.0, leave)
    started = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, *map(str, (page.descriptor, row, *numbers))],
            pass_fds=[page.descriptor], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )
        for row in range(2)
    ]  # fmt: skip
    for it in started:
        assert it.stdout.readline() == "ready\n"
    return started


def begin(process: subprocess.Popen[str]) -> None:
    process.stdin.write("\n")
    process.stdin.flush()


def said(process: subprocess.Popen[str]) -> list[int]:
    return [int(it) for it in process.stdout.readline().split()]


def end(started: list[subprocess.Popen[str]]) -> None:
    for it in started:
        it.kill()
        it.communicate()


@pytest.mark.parametrize(("concurrency", "per_minute", "leave"), [(777, 10**6, "stay"), (10**6, 777, "leave")])
def test_quotas_are_exact_over_two_processes(concurrency: int, per_minute: int, leave: str, page: QuotaPage) -> None:
    started = workers_of(page, concurrency, per_minute, 5000, leave)
    try:
        for it in started:
            begin(it)
        taken = [said(it) for it in started]
        assert sum(it[1] for it in taken) == 0, "somebody was careless"
        assert sum(it[0] for it in taken) == 777
    finally:
        end(started)


def test_a_worker_that_dies_gives_back_what_it_had(page: QuotaPage, rows: list[QuotaPage]) -> None:
    started = workers_of(page, 10, 10**6, 10, "stay")
    try:
        begin(started[1])
        assert said(started[1]) == [10, 0]
        ours = KeyedTenants([spec("t", KEYS[0], concurrency=10)], rows[2], SECRET)
        assert ours.enter(spec("t"), 1.0) is not None
        started[1].send_signal(signal.SIGKILL)
        started[1].wait()
        page.clear(1)
        assert ours.enter(spec("t"), 1.0) is None
    finally:
        end(started)


HOLDER = """
import fcntl, sys
fcntl.lockf(int(sys.argv[1]), fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.readline()
"""


def test_a_worker_that_is_stopped_with_the_lock_does_not_stop_the_others(rows: list[QuotaPage]) -> None:
    row = rows[0]
    command = [sys.executable, "-c", HOLDER, str(row.descriptor)]
    holder = subprocess.Popen(
        command, pass_fds=[row.descriptor], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "locked\n"
        known = KeyedTenants([spec("a", KEYS[0], concurrency=2)], row, SECRET)
        took_s = eventually(lambda: [known.enter(spec("a"), 1.0) for _ in range(200)])
        assert known.state()["careless"] == 200
        assert known.state()["rows"][0]["in_progress"] == 2  # the quota holds all the same
        assert took_s < 10 * LOCK_S  # waited for once, and not 200 times
    finally:
        end([holder])
    assert known.enter(spec("a"), 1.0) == 1.0
    assert known.state()["careless"] == 200
