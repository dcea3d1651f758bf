"""Who is there: four frames before anything else is said, in a protocol that never changes.

    HELLO      ->  cluster, protocols, who I am, whom I expect (name and epoch), a nonce
    CHALLENGE  <-  the protocol that both speak, a nonce
    PROOF      ->  HMAC-SHA256 by the token, over both frames before
    WELCOME    <-  the same, also over PROOF

The asker proves itself first, so nobody without the token gets anything that was computed with it; the two sides'
roles are part of what is proven, so nothing that one side says is an answer to it; both nonces are, so nothing can be
replayed. Whom the asker expects is compared only after it has proven itself, and what is sent back never names what was
expected of it. With mutual TLS, both certificates must be for the names of the members.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import ssl
import struct
from dataclasses import dataclass

import msgspec

from headwater.errors import ProtocolError, RefusedError, UnavailableError
from headwater.transports.credentials import Credentials, certified_names, speaks_for
from headwater.transports.stream import Stream
from headwater.transports.wire import (
    HANDSHAKE,
    MAGIC,
    MOST_GREETING,
    NEWEST,
    OLDEST,
    Kind,
    Refused,
    decode_refused,
    decode_with,
    encode_message,
)
from headwater.types import Member

NONCE_BYTES = 32
MOST_WORD = 256
ALERT = b"\x15\x03"
"""What TLS says to plain text begins so."""
GREETING_S = 2.0
"""How long somebody may be connected without having proven who it is."""


class Hello(msgspec.Struct, array_like=True):
    """Who asks, and for whom."""

    cluster: str
    oldest: int
    newest: int
    name: str
    epoch: int
    expected_name: str
    expected_epoch: int
    nonce: bytes
    transport: str = "tcp"


class Challenge(msgspec.Struct, array_like=True):
    """What the asker has to prove itself for."""

    protocol: int
    nonce: bytes


class Proof(msgspec.Struct, array_like=True):
    """PROOF and WELCOME; empty where the cluster has no token."""

    proof: bytes


_hello = msgspec.msgpack.Decoder(Hello)
_challenge = msgspec.msgpack.Decoder(Challenge)
_proof = msgspec.msgpack.Decoder(Proof)


@dataclass(frozen=True, slots=True)
class Guest:
    """Who is at the other end of an accepted connection."""

    name: str
    epoch: int
    transport: str


def introduce(
    stream: Stream,
    me: Member,
    peer: Member,
    cluster: str,
    credentials: Credentials,
    until_s: float,
    transport: str = "tcp",
) -> None:
    """The asker's side: after it, the stream is one to exactly `peer`. Raises RefusedError, UnavailableError."""
    try:
        _check_certificate(stream, peer.name)
        _introduce(stream, me, peer, cluster, credentials, until_s, transport)
    except ProtocolError as error:
        stream.shut()
        raise UnavailableError(str(error)) from None
    except RefusedError:
        stream.shut()
        raise
    except UnavailableError:
        if stream.alert:
            remedy = "compare tls_cert and tls_ca of both nodes, and the certificate's last day"
            raise RefusedError("tls", "a certificate that the peer takes", stream.alert, remedy) from None
        raise


def _introduce(
    stream: Stream, me: Member, peer: Member, cluster: str, credentials: Credentials, until_s: float, transport: str
) -> None:
    words = Introduction(me, peer, cluster, credentials, transport)
    stream.say(Kind.HELLO, words.hello, until_s)
    if stream.peek(len(ALERT), until_s)[: len(ALERT)] == ALERT:
        stream.shut()
        raise not_encrypted()
    stream.say(Kind.PROOF, words.prove(_due(stream, Kind.CHALLENGE, until_s)), until_s)
    words.believe(_due(stream, Kind.WELCOME, until_s))
    stream.agree(words.protocol, words.seed)


class Introduction:
    """What the asker says, and believes, over whatever connection: HELLO's body, then PROOF's for a CHALLENGE, and
    whether to believe a WELCOME; then what all later frames are of. Each once, in this order."""

    def __init__(self, me: Member, peer: Member, cluster: str, credentials: Credentials, transport: str) -> None:
        nonce = secrets.token_bytes(NONCE_BYTES)
        whom = peer.name, peer.epoch
        self.hello = encode_message(Hello(cluster, OLDEST, NEWEST, me.name, me.epoch, *whom, nonce, transport))
        self.protocol, self.seed = HANDSHAKE, 0
        self._token = credentials.tokens[0] if credentials.tokens else b""
        self._transcript = self._proof = b""

    def prove(self, answer: bytes) -> bytes:
        """The body of PROOF. Raises ProtocolError."""
        challenge = decode_with(_challenge, answer)
        if not OLDEST <= challenge.protocol <= NEWEST or len(challenge.nonce) != NONCE_BYTES:
            raise ProtocolError(f"a challenge of protocol {challenge.protocol}")
        self.protocol, self._transcript = challenge.protocol, _transcript(self.hello, answer)
        self._proof = _prove(self._token, b"asker", self._transcript)
        return encode_message(Proof(self._proof))

    def believe(self, welcome: bytes) -> None:
        """Raises RefusedError if the other side has not proven that it has our token; ProtocolError."""
        theirs = decode_with(_proof, welcome).proof
        if not hmac.compare_digest(theirs, _prove(self._token, b"asked", self._transcript + self._proof)):
            given = "none" if not theirs else "another"
            remedy = "compare token_file of both nodes"
            raise RefusedError("token", "a proof that the peer has our token", given, remedy)
        self.seed = _seed(self._token, self._transcript)


def not_encrypted() -> RefusedError:
    """What to raise for an ALERT: who was asked speaks TLS, and we do not."""
    return RefusedError("tls", "TLS", "plain text", "set tls_cert, tls_key and tls_ca as on the other nodes")


def _due(stream: Stream, kind: Kind, until_s: float) -> bytes:
    found, body = stream.hear(until_s, MOST_GREETING)
    if found is Kind.REFUSED:
        stream.shut()
        raise decode_refused(body)
    if found is not kind:
        raise stream.nonsense(f"{found.name} where {kind.name} was due")
    return bytes(body)


def receive(stream: Stream, me: Member, cluster: str, credentials: Credentials, until_s: float) -> Guest:
    """The other side: who asks, once it is known that it may. Raises RefusedError after it has said so, ProtocolError,
    UnavailableError."""
    try:
        return _receive(stream, me, cluster, credentials, until_s)
    except RefusedError as error:
        stream.say(Kind.REFUSED, encode_message(Refused.of(error)), until_s)
        stream.shut()
        raise


def _receive(stream: Stream, me: Member, cluster: str, credentials: Credentials, until_s: float) -> Guest:
    if not MAGIC.startswith(stream.peek(len(MAGIC), until_s)):
        raise stream.nonsense("a greeting of something else")
    first = _only(stream, Kind.HELLO, until_s, MOST_GREETING)
    hello = decode_with(_hello, first)
    if len(hello.nonce) != NONCE_BYTES or max(map(len, (hello.name, hello.cluster, hello.transport))) > MOST_WORD:
        raise stream.nonsense(f"a greeting with a nonce of {len(hello.nonce)} bytes")
    protocol = min(NEWEST, hello.newest)
    if protocol < max(OLDEST, hello.oldest):
        theirs = f"{hello.oldest} to {hello.newest}"
        raise RefusedError("protocol", f"{OLDEST} to {NEWEST}", theirs, "bring both nodes to versions that meet")
    if hello.cluster != cluster:
        raise RefusedError("cluster", "that of the node asked", hello.cluster, "give both nodes the same node.cluster")
    _check_certificate(stream, hello.name)
    answer = encode_message(Challenge(protocol, secrets.token_bytes(NONCE_BYTES)))
    stream.say(Kind.CHALLENGE, answer, until_s)
    transcript = _transcript(first, answer)
    proof = decode_with(_proof, _only(stream, Kind.PROOF, until_s, MOST_GREETING - len(first))).proof
    token = _fitting(credentials.tokens, proof, transcript)
    if token is None:
        given = "none" if not proof else "another"
        raise RefusedError("token", "a proof of this cluster's token", given, "compare token_file of both nodes")
    if (hello.expected_name, hello.expected_epoch) != (me.name, me.epoch):
        expected = f"{hello.expected_name} in its life {hello.expected_epoch}"
        raise RefusedError("member", expected, "another", "look up in the directory who is there now")
    stream.say(Kind.WELCOME, encode_message(Proof(_prove(token, b"asked", transcript + proof))), until_s)
    stream.agree(protocol, _seed(token, transcript))
    return Guest(hello.name, hello.epoch, hello.transport)


def _only(stream: Stream, kind: Kind, until_s: float, most_bytes: int) -> bytes:
    found, body = stream.hear(until_s, max(most_bytes, 0), ahead_bytes=0)
    if found is not kind:
        raise stream.nonsense(f"{found.name} where {kind.name} was due")
    return bytes(body)


def _fitting(tokens: tuple[bytes, ...], proof: bytes, transcript: bytes) -> bytes | None:
    """The token that a proof was made with; every one is tried, however early one fits."""
    found = None
    for token in tokens or (b"",):
        if hmac.compare_digest(proof, _prove(token, b"asker", transcript)):
            found = token
    return found


def _prove(token: bytes, role: bytes, transcript: bytes) -> bytes:
    """The proof of a role in what was said; nothing without a token."""
    return hmac.digest(token, b"headwater peer " + role + transcript, "sha256") if token else b""


def _transcript(hello: bytes, challenge: bytes) -> bytes:
    lengths = struct.pack("<II", len(hello), len(challenge))
    return hashlib.sha256(lengths + hello + challenge).digest()


def _seed(token: bytes, transcript: bytes) -> int:
    """What the checksums of this connection's frames start from: who does not know the token cannot make one up."""
    return int.from_bytes(hmac.digest(token, b"headwater frames" + transcript, "sha256")[:8], "little")


def _check_certificate(stream: Stream, name: str) -> None:
    if isinstance(stream.socket, ssl.SSLSocket):
        check_certified(stream.socket.getpeercert(), name)


def check_certified(certificate: object, name: str) -> None:
    """With TLS, the verified certificate of the other side must be for the member that it is taken for; raises
    RefusedError."""
    names = certified_names(certificate)
    if not speaks_for(names, name):
        given = ", ".join(sorted(names)) or "no name"
        raise RefusedError("tls", f"a certificate for {name}", given, "issue one with the node's name in it")
