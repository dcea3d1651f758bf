"""Who is not of the cluster gets nothing: no byte of KV, nothing computed with the token, no thread for long."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest

from headwater.errors import ProtocolError, RefusedError, UnavailableError
from headwater.ports import Item
from headwater.transports import handshake, server, wire
from headwater.transports.credentials import Credentials, certified_names, speaks_for
from headwater.transports.handshake import Hello, Proof
from headwater.transports.memory_exports import region_name
from headwater.transports.server import PeerServer, printable
from headwater.transports.stream import Stream
from headwater.transports.tcp import Tcp
from headwater.transports.wire import Kind
from headwater.types import Member, Outcome
from tests.conformance.transport import MEMBER, REALM, KeptExports, soon
from tests.node.conftest import eventually
from tests.transports.certificates import Authority

ASKER = Member("asker", 3, "")
OLD, NEW, OTHER = b"the old token of it", b"the new token of it", b"some other token...."


@contextmanager
def serving(credentials: Credentials, cluster: str = "test") -> Iterator[PeerServer]:
    exports = KeptExports()
    exports.add(np.arange(4096, dtype=np.uint32).view(np.uint8))
    it = PeerServer(MEMBER, cluster, exports, credentials, ("127.0.0.1", 0))
    it.start()
    try:
        yield it
    finally:
        it.close(soon())


def member(it: PeerServer) -> Member:
    return replace(MEMBER, address=it.address)


def connect(it: PeerServer, credentials: Credentials, cluster: str = "test", me: Member = ASKER) -> None:
    """Connect, and read to see that it works."""
    link = Tcp(me, cluster, credentials).connect(member(it), soon())
    try:
        item = Item(region_name(0, 0, 100), np.zeros(100, np.uint8))
        assert link.read(REALM, [item], soon()) == [Outcome.DONE]
    finally:
        link.close()


def raw(it: PeerServer) -> Stream:
    host, _, port = it.address.rpartition(":")
    return Stream(socket.create_connection((host, int(port)), 5), "raw")


def refused(it: PeerServer, reason: str, count: int = 1) -> None:
    """Exactly so many were refused for that, and no KV was sent."""
    eventually(lambda: it.stats()["refused"] == {reason: count}, seen=lambda: str(it.stats()))
    assert it.stats()["payload_out"] == 0
    assert it.stats()["requests"] == 0
    eventually(lambda: it.stats()["strangers"] == 0)


# ---- tokens ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mine", "theirs"), [((OTHER,), (OLD,)), ((), (OLD,)), ((OTHER,), (OLD, NEW)), ((OTHER, OLD), (OLD,))]
)
def test_a_wrong_token_or_none(mine: tuple[bytes, ...], theirs: tuple[bytes, ...]) -> None:
    with serving(Credentials(theirs)) as it:
        with pytest.raises(RefusedError, match=r"token.*token_file"):
            connect(it, Credentials(mine))
        refused(it, "token")


def test_a_server_without_the_token_is_not_believed() -> None:
    with serving(Credentials()) as it:
        with pytest.raises(RefusedError, match="token"):
            connect(it, Credentials((OLD,)))
        assert it.stats()["payload_out"] == 0


def test_tokens_can_be_replaced_step_by_step() -> None:
    steps = [(OLD,), (OLD, NEW), (NEW, OLD), (NEW,)]
    for before, after in pairwise(steps):
        for mine, theirs in ((before, after), (after, before), (after, after)):
            with serving(Credentials(theirs)) as it:
                connect(it, Credentials(mine))


def test_tokens_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append(len(one))
        return one == other

    monkeypatch.setattr(handshake.hmac, "compare_digest", compare)
    with serving(Credentials((OLD, NEW))) as it:
        connect(it, Credentials((OLD,)))
    assert compared == [32, 32, 32], "each token once, whichever fits, and the answer"


def say_hello(stream: Stream, **changes: object) -> tuple[bytes, bytes]:
    """HELLO, and the answer, raw."""
    hello = Hello("test", 1, 1, "asker", 3, MEMBER.name, MEMBER.epoch, bytes(32))
    body = wire.encode_message(msgspec.structs.replace(hello, **changes))
    stream.say(Kind.HELLO, body, soon())
    kind, answer = stream.hear(soon())
    if kind is Kind.REFUSED:
        raise wire.decode_refused(answer)
    assert kind is Kind.CHALLENGE
    return body, bytes(answer)


def prove(stream: Stream, proof: bytes) -> bytes:
    stream.say(Kind.PROOF, wire.encode_message(Proof(proof)), soon())
    kind, answer = stream.hear(soon())
    if kind is Kind.REFUSED:
        raise wire.decode_refused(answer)
    assert kind is Kind.WELCOME
    return msgspec.msgpack.decode(answer, type=Proof).proof


def test_a_replayed_handshake_proves_nothing() -> None:
    with serving(Credentials((OLD,))) as it:
        first, second = raw(it), raw(it)
        hello, challenge = say_hello(first)
        proof = handshake._prove(OLD, b"asker", handshake._transcript(hello, challenge))
        assert len(prove(first, proof)) == 32
        assert say_hello(second)[0] == hello, "the same words again"
        with pytest.raises(RefusedError, match="token"):
            prove(second, proof)
        for stream in (first, second):
            stream.close()
        refused(it, "token")


def test_a_proof_that_is_sent_back_proves_nothing() -> None:
    """A listener without the token that repeats what it hears."""
    assert handshake._prove(OLD, b"asker", b"words") != handshake._prove(OLD, b"asked", b"words")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        errors: list[Exception] = []
        transport = Tcp(ASKER, "test", Credentials((OLD,)))

        def ask() -> None:
            try:
                transport.connect(replace(MEMBER, address=address), soon())
            except RefusedError as error:
                errors.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        accepted = Stream(listener.accept()[0], "echo")
        accepted.hear(soon())
        accepted.say(Kind.CHALLENGE, wire.encode_message(handshake.Challenge(1, bytes(32))), soon())
        _, proof = accepted.hear(soon())
        accepted.say(Kind.WELCOME, bytes(proof), soon())
        thread.join(10)
        accepted.close()
        assert len(errors) == 1 and "token" in str(errors[0])


# ---- who and what ---------------------------------------------------------------------------------------


def test_another_cluster() -> None:
    with serving(Credentials((OLD,)), "blue") as it:
        with pytest.raises(RefusedError, match=r"cluster.*green") as caught:
            connect(it, Credentials((OLD,)), "green")
        assert "blue" not in str(caught.value), "a stranger was told the cluster's name"
        refused(it, "cluster")


def test_another_life_is_said_only_to_members() -> None:
    with serving(Credentials((OLD,))) as it:
        stream = raw(it)
        hello, challenge = say_hello(stream, expected_epoch=MEMBER.epoch + 1)
        with pytest.raises(RefusedError, match="token"):
            prove(stream, bytes(32))
        stream.close()
        stream = raw(it)
        hello, challenge = say_hello(stream, expected_epoch=MEMBER.epoch + 1)
        with pytest.raises(RefusedError, match="member"):
            prove(stream, handshake._prove(OLD, b"asker", handshake._transcript(hello, challenge)))
        stream.close()
        assert it.stats()["payload_out"] == 0


def test_an_address_that_is_used_again_by_another_life() -> None:
    lives = [MEMBER]
    exports = KeptExports()
    it = PeerServer(lambda: lives[-1], "test", exports, Credentials(), ("127.0.0.1", 0))
    it.start()
    connectable = Tcp(lambda: ASKER, "test", Credentials())
    connectable.connect(member(it), soon()).close()
    lives.append(replace(MEMBER, epoch=8))
    with pytest.raises(RefusedError, match="member"):
        connectable.connect(member(it), soon())
    it.close(soon())


@pytest.mark.parametrize(("oldest", "newest"), [(2, 9), (0, 0), (5, 1)])
def test_protocols_that_do_not_meet(oldest: int, newest: int) -> None:
    with serving(Credentials()) as it:
        stream = raw(it)
        with pytest.raises(RefusedError, match="protocol"):
            say_hello(stream, oldest=oldest, newest=newest)
        stream.close()
        refused(it, "protocol")


def test_a_newer_asker_is_met_at_what_both_speak() -> None:
    with serving(Credentials()) as it:
        stream = raw(it)
        _, answer = say_hello(stream, oldest=1, newest=9)
        assert msgspec.msgpack.decode(answer, type=handshake.Challenge).protocol == 1
        stream.close()


# ---- TLS ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(Path(tmp_path_factory.mktemp("tls")))


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(Path(tmp_path_factory.mktemp("tls")), "strangers")


@pytest.mark.parametrize("side", ["asker", "holder"])
@pytest.mark.parametrize("fault", ["authority", "expired", "name"])
def test_a_certificate_that_is_wrong(authority: Authority, strangers: Authority, fault: str, side: str) -> None:
    right = {name: authority.sign(name) for name in ("asker", "holder")}
    wrong = {
        "authority": lambda: strangers.sign(side),
        "expired": lambda: authority.sign(side, last_day=-1),
        "name": lambda: authority.sign("somebody"),
    }[fault]()
    if fault == "authority":  # it trusts the right ones, so that only the other side can refuse
        for context in (wrong.server_tls, wrong.client_tls):
            assert context is not None
            context.load_verify_locations(authority.path)
    given = right | {side: wrong}
    with serving(given["holder"]) as it:
        with pytest.raises(RefusedError, match="tls"):
            connect(it, given["asker"])
        assert it.stats()["payload_out"] == 0 and it.stats()["requests"] == 0


def test_plain_text_to_a_tls_port_and_the_reverse(authority: Authority) -> None:
    with serving(authority.sign("holder")) as it:
        with pytest.raises(RefusedError, match=r"tls.*plain text"):
            connect(it, Credentials())
        refused(it, "tls")
    with serving(Credentials()) as it:
        with pytest.raises((RefusedError, UnavailableError)):
            connect(it, authority.sign("asker"))
        assert it.stats()["payload_out"] == 0


def test_both_token_and_certificate_are_needed_where_both_are_set(authority: Authority) -> None:
    asker, holder = authority.sign("asker"), authority.sign("holder")
    with serving(Credentials((OLD,), holder.server_tls, holder.client_tls)) as it:
        with pytest.raises(RefusedError, match="token"):
            connect(it, asker)
        connect(it, Credentials((OLD,), asker.server_tls, asker.client_tls))


def test_names_of_certificates() -> None:
    names = certified_names({"subjectAltName": (("DNS", "A.b.c"), ("DNS", "*.d.e"), ("IP Address", "10.0.0.5"))})
    assert [speaks_for(names, it) for it in ("a.b.c", "x.d.e", "10.0.0.5")] == [True] * 3
    assert [speaks_for(names, it) for it in ("b.c", "d.e", "x.y.d.e", "", "*", "10.0.0.6")] == [False] * 6
    assert certified_names(None) == set()


# ---- strangers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [b"GET / HTTP/1.1\r\n\r\n", b"\x80\x02}q\x00.", bytes(64), b"HW" + bytes(62), b"\x16\x03\x01" + bytes(100), b"H"],
    ids=["http", "pickle", "zeros", "magic", "tls", "one byte"],
)
def test_what_is_not_the_protocol_gets_no_answer(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "GREETING_S", 0.2)
    with serving(Credentials((OLD,))) as it:
        stream = raw(it)
        stream.socket.sendall(said)
        with suppress(ConnectionResetError):
            assert stream.socket.recv(100) == b""
        stream.close()
        refused(it, "late" if said == b"H" else "garbage")
        assert it.stats()["bytes_out"] == 0
        connect(it, Credentials((OLD,)))


def test_a_scanner_of_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(Credentials((OLD,))) as it:
        for _ in range(20):
            raw(it).close()
        eventually(lambda: it.stats()["refused"] == {"gone": 20}, seen=lambda: str(it.stats()))
        connect(it, Credentials((OLD,)))


def test_who_says_nothing_or_little_is_gone_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "GREETING_S", 0.3)
    with serving(Credentials((OLD,))) as it:
        silent, slow = raw(it), raw(it)
        frame = b"".join(slow.frame(Kind.HELLO, bytes(1000)))
        begun_s = time.monotonic()
        for at in range(30):
            try:
                slow.socket.send(frame[at : at + 1])
            except OSError:
                break
            silent.socket.settimeout(0.02)
            try:
                if silent.socket.recv(1) == b"":
                    break
            except TimeoutError:
                continue
        assert 0.2 < time.monotonic() - begun_s < 2
        silent.close()
        slow.close()
        refused(it, "late", 2)


def test_strangers_may_say_little(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(Credentials((OLD,))) as it:
        stream = raw(it)
        stream.say(Kind.HELLO, bytes(wire.MOST_GREETING + 1), soon())
        with pytest.raises(UnavailableError):
            stream.hear(soon())
        stream.close()
        refused(it, "garbage")


def test_strangers_are_few_at_a_time_and_touch_no_member(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_STRANGERS", 3)
    with serving(Credentials((OLD,))) as it:
        link = Tcp(ASKER, "test", Credentials((OLD,))).connect(member(it), soon())
        eventually(lambda: it.stats()["strangers"] == 0)
        crowd = [raw(it) for _ in range(3)]
        eventually(lambda: it.stats()["strangers"] == 3)
        # A member gets in all the same: who has said nothing for longest goes.
        late = Tcp(ASKER, "test", Credentials((OLD,))).connect(member(it), soon())
        assert crowd[0].socket.recv(1) == b""
        item = Item(region_name(0, 0, 100), np.zeros(100, np.uint8))
        for them in (link, late):
            assert them.read(REALM, [item], soon()) == [Outcome.DONE]
            them.close()
        for stream in crowd:
            stream.close()
        eventually(lambda: it.stats()["strangers"] == 0)


def test_strangers_are_bounded_however_fast_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_STRANGERS", 2)
    monkeypatch.setattr(server.PeerServer, "_hurry_strangers", lambda self: None)
    with serving(Credentials((OLD,))) as it:
        crowd = [raw(it) for _ in range(6)]
        eventually(lambda: it.stats()["turned_away"] == 2)
        assert it.stats()["strangers"] == 4
        for stream in crowd:
            stream.close()


def test_without_credentials_only_loopback_is_believed() -> None:
    """The directory may say anything of where a member is."""
    elsewhere = replace(ASKER, name="b", address="192.0.2.7:7420")
    with pytest.raises(UnavailableError, match="only loopback"):
        Tcp(ASKER, "test", Credentials()).connect(elsewhere, soon())


def test_who_does_not_know_the_token_cannot_make_frames_up() -> None:
    """What a connection's frames start from depends on it, not only on what everybody can hear."""
    transcript = bytes(32)
    assert handshake._seed(OLD, transcript) != handshake._seed(b"another token of them", transcript)


@pytest.mark.parametrize("kind", [Kind.HELLO])
def test_nested_nonsense_is_only_nonsense(kind: Kind) -> None:
    with serving(Credentials((OLD,))) as it:
        stream = raw(it)
        stream.say(kind, b"\x91" * 4000, soon())
        with pytest.raises((UnavailableError, ProtocolError)):
            stream.hear(soon())
        stream.close()
        refused(it, "garbage")


def test_a_stranger_writes_one_line_into_the_log(caplog: pytest.LogCaptureFixture) -> None:
    words = printable("a\nforged line\x1b[31m" + "x" * 1000)
    assert words.startswith("a?forged line?[31m")
    assert len(words) <= 400
    with serving(Credentials((OLD,))) as it, pytest.raises(RefusedError):
        Tcp(ASKER, "other\ncluster", Credentials((OLD,))).connect(member(it), soon())
    assert "\n" not in "".join(record.getMessage() for record in caplog.records)


def test_no_more_threads_is_no_end_of_accepting(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(Credentials((OLD,))) as it:
        start, failing = threading.Thread.start, [True]

        def starts(thread: threading.Thread) -> None:
            if thread.name == "headwater-peer" and failing.pop() if failing else False:
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", starts)
        with pytest.raises(UnavailableError):
            Tcp(ASKER, "test", Credentials((OLD,))).connect(member(it), soon())
        eventually(lambda: it.stats()["turned_away"] == 1)
        Tcp(ASKER, "test", Credentials((OLD,))).connect(member(it), soon()).close()


def test_no_thread_to_look_a_name_up_is_said_and_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    named = replace(ASKER, name="b", address="localhost:1")
    with monkeypatch.context() as patched:

        def starts(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        patched.setattr(threading.Thread, "start", starts)
        with pytest.raises(UnavailableError, match="no thread to look up"):
            Tcp(ASKER, "test", Credentials()).connect(named, soon())
    with pytest.raises(UnavailableError, match="refused"):
        Tcp(ASKER, "test", Credentials()).connect(named, soon())


def test_a_server_is_closed_once(tmp_path: Path) -> None:
    with serving(Credentials((OLD,))) as it:
        it.close(soon())
        with (tmp_path / "victim").open("wb") as victim:
            it.close(soon())
            assert victim.tell() == 0


@pytest.mark.parametrize("kind", [Kind.READ, Kind.ASK, Kind.LEND, Kind.PROOF, Kind.WELCOME])
def test_nothing_is_served_before_the_handshake(kind: Kind) -> None:
    with serving(Credentials((OLD,))) as it:
        stream = raw(it)
        stream.say(kind, wire.encode_batch(wire.Batch(REALM, [region_name(0, 0, 64)], [64], 1.0)), soon())
        with pytest.raises((UnavailableError, ProtocolError)):
            stream.hear(soon())
        stream.close()
        refused(it, "garbage")
