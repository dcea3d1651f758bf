"""How chunks lie in Redis or Valkey, and the conversation that reads and writes them over one connection.

    headwater:CLUSTER:CODEC:ROOT:GROUP:KEY:h             the header page; the chunk exists if and only if this key does
    headwater:CLUSTER:CODEC:ROOT:GROUP:KEY:CHECKSUM:0    the first piece of the payload with that checksum, and so on

Large values are slow in these servers, so payloads are split. All pieces are there before the header is written, and
the header's checksum is in the names of its pieces: two nodes that write one chunk at a time, or one that reads while
another writes, cannot mix what does not belong together. Whoever replaces a header removes the old pieces.

The server may drop any key at any time. A header without a piece is a miss, and is removed. Pieces without a header
(their writer died) are left to the server's own policy or to their time to live.
"""

from __future__ import annotations

from binascii import hexlify
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import xxhash

from headwater.errors import UnavailableError
from headwater.ports import Bytes, Piece
from headwater.tiers.codec import Codec, bring_back
from headwater.tiers.header import (
    Encoded,
    Header,
    Unreadable,
    payload_checksum,
    read_header,
    write_header,
)
from headwater.tiers.resp import BROKEN, Buffer, Connection, Received, Reply, ServerError, command, explain
from headwater.tiers.scratch import Scratch
from headwater.types import PAGE_BYTES, Identity, Origin, Outcome

HEADER_END = b":h"
PIECE_BYTES = 512 << 10
AHEAD = 4
"""Pieces asked for before the first of them is here; more only fills the server's memory."""


@dataclass(slots=True)
class _Job:
    """One chunk on its way: its header, the keys of its pieces, and what has been found out about it."""

    index: int
    piece: Piece
    header: Header
    names: list[bytes]
    page: Buffer = b""
    verdict: Outcome | None = None
    checksum: xxhash.xxh3_128 = field(default_factory=xxhash.xxh3_128)


class RedisChunks:
    """The words of that conversation; without state but memory for codecs, and for all threads."""

    def __init__(self, name: str, cluster: str, codec: Codec, ttl_s: float | None) -> None:
        self.prefix = f"headwater:{cluster}:{codec.name}:"
        self._name, self._codec, self._scratch = name, codec, Scratch()
        self._expiry = (b"PX", b"%d" % max(1, int(ttl_s * 1000))) if ttl_s is not None else ()
        self._get = b"GETEX" if self._expiry else b"GET"

    def read(self, link: Connection, pieces: Sequence[Piece], outcomes: list[Outcome], until_s: float) -> None:
        """Fill each piece's memory and say what became of it in `outcomes`, one by one."""
        jobs: list[_Job] = []
        headers = self.headers(link, [it.identity for it in pieces], until_s)
        for index, (piece, header) in enumerate(zip(pieces, headers, strict=True)):
            found = header if isinstance(header, Outcome) else self._job(index, piece, header)
            if isinstance(found, Outcome):
                outcomes[index] = found
            else:
                jobs.append(found)
        self._receive(link, jobs, outcomes, until_s)
        # Its pieces are gone, so it is not there: nobody should be told otherwise.
        gone = [self.header_name(it.piece.identity) for it in jobs if outcomes[it.index] is Outcome.MISSING]
        self.unlink(link, gone, until_s)

    def _job(self, index: int, piece: Piece, header: Header) -> _Job | Outcome:
        """What there is to do where this header was found; an outcome where it is of no use."""
        identity, stored_bytes = piece.identity, header.encoded.stored_bytes
        if not header.names(identity) or header.encoded.codec != self._codec.name:
            return Outcome.FOREIGN
        most = self._codec.stored_bytes(identity)
        if not 0 < stored_bytes <= most or (self._codec.in_place and stored_bytes != most):
            return Outcome.CORRUPT
        return _Job(index, piece, header, self.names(identity, header))

    def _receive(self, link: Connection, jobs: list[_Job], outcomes: list[Outcome], until_s: float) -> None:
        """Bring the pieces of all jobs, asking for a few of them ahead."""
        plan = ((job, part) for job in jobs for part in range(len(job.names)))
        asked: deque[tuple[_Job, int]] = deque()
        while True:
            fresh: list[bytes] = []
            if len(asked) <= AHEAD // 2:
                while len(asked) < AHEAD and (following := next(plan, None)) is not None:
                    job, part = following
                    if job.verdict is None:
                        asked.append(following)
                        fresh.append(command(self._get, job.names[part], *self._expiry))
            if not asked:
                return
            if fresh:
                link.send([b"".join(fresh)], until_s)
            job, part = asked.popleft()
            stored = self._memory_of(job)
            target = stored[part * PIECE_BYTES : (part + 1) * PIECE_BYTES].data
            found = link.receive(target, until_s)
            if found is Received.VALUE:
                job.checksum.update(target)  # now, while the bytes are in the cache
            elif job.verdict is None:
                job.verdict = outcomes[job.index] = self._absent(found)
            if part + 1 == len(job.names) and job.verdict is None:
                job.verdict = outcomes[job.index] = self._finish(job, stored)

    def _memory_of(self, job: _Job) -> Bytes:
        """Where the stored bytes go: what a codec has to bring back first goes into a buffer, one chunk at a time."""
        if self._codec.in_place:
            return job.piece.memory
        return self._scratch.take(job.header.encoded.stored_bytes)

    def _finish(self, job: _Job, stored: Bytes) -> Outcome:
        """All bytes are here: are they right, and can they be brought back into what they were?"""
        if job.checksum.digest() != job.header.checksum:
            return Outcome.CORRUPT
        if self._codec.in_place:
            return Outcome.DONE
        return bring_back(self._codec, job.piece.identity, job.header.encoded, stored, job.piece.memory)

    def write(self, link: Connection, pieces: Sequence[Piece], outcomes: list[Outcome], until_s: float) -> None:
        """Send the pieces of each chunk, and with those of the next one its header, once the server has them all."""
        garbage: list[bytes] = []
        published: _Job | None = None
        sent: _Job | None = None
        for index, piece in enumerate(pieces):
            made = self._encode(index, piece)  # while the server is busy with what was sent before
            if made is None:
                outcomes[index] = Outcome.REFUSED
                continue
            ready = self._arrived(link, published, sent, outcomes, garbage, until_s)
            if sent and outcomes[sent.index] is Outcome.FULL:
                outcomes[sent.index :] = [Outcome.FULL] * (len(pieces) - sent.index)
                published = sent = None
                break
            job, stored = made
            parts = self._publish(ready) if ready else []
            for part, name in enumerate(job.names):
                parts += self._set(name, stored[part * PIECE_BYTES : (part + 1) * PIECE_BYTES].data)
            link.send(parts, until_s)
            published, sent = ready, job
        last = self._arrived(link, published, sent, outcomes, garbage, until_s)
        if last:
            link.send(self._publish(last), until_s)
            self._arrived(link, last, None, outcomes, garbage, until_s)
        self.unlink(link, garbage, until_s)

    def _arrived(
        self,
        link: Connection,
        published: _Job | None,
        sent: _Job | None,
        outcomes: list[Outcome],
        garbage: list[bytes],
        until_s: float,
    ) -> _Job | None:
        """Wait for what the server says of a header and of the pieces behind it; the chunk to publish next, if any."""
        if published:
            outcomes[published.index] = self._published(link, published, garbage, until_s)
        if sent is None:
            return None
        outcome = self._stored(link, sent, until_s)
        if outcome is Outcome.DONE:
            return sent
        outcomes[sent.index] = outcome
        garbage += sent.names
        return None

    def _encode(self, index: int, piece: Piece) -> tuple[_Job, Bytes] | None:
        """The chunk as it will lie in the server, with its header; None if its codec has no key for it."""
        identity = piece.identity
        if self._codec.in_place:
            stored, encoded = piece.memory, Encoded(identity.length_bytes, self._codec.name)
        else:
            scratch = self._scratch.take(self._codec.stored_bytes(identity))
            done = self._codec.encode(identity, piece.memory, scratch)
            if done is None:
                return None
            stored, encoded = scratch[: done.stored_bytes], done
        page = memoryview(bytearray(PAGE_BYTES))
        write_header(page, identity, encoded, payload_checksum(stored))
        header = read_header(page)
        assert isinstance(header, Header), "we cannot read what we wrote"
        return _Job(index, piece, header, self.names(identity, header), page), stored

    def _set(self, name: bytes, value: Buffer, *options: bytes) -> list[Buffer]:
        """SET as parts to send, the value where it lies."""
        words = 3 + len(self._expiry) + len(options)
        head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (words, len(name), name, len(value))
        tail = b"".join(b"$%d\r\n%s\r\n" % (len(it), it) for it in (*self._expiry, *options))
        return [head, value, b"\r\n" + tail]

    def _publish(self, job: _Job) -> list[Buffer]:
        return self._set(self.header_name(job.piece.identity), job.page, b"GET")

    def _stored(self, link: Connection, job: _Job, until_s: float) -> Outcome:
        """The server's answers to the pieces of a chunk: DONE if it can be published."""
        replies = [link.reply(until_s) for _ in job.names]
        failed = [it for it in replies if it != b"OK"]
        return self._failure(failed[0]) if failed else Outcome.DONE

    def _published(self, link: Connection, job: _Job, garbage: list[bytes], until_s: float) -> Outcome:
        """The server's answer to a header: what was in its place before, whose pieces nobody needs any more."""
        page = memoryview(bytearray(PAGE_BYTES))
        found = link.receive(page, until_s)
        if isinstance(found, ServerError):
            garbage += [self.header_name(job.piece.identity), *job.names]
            return self._failure(found)
        before = read_header(page) if found is Received.VALUE else None
        if isinstance(before, Header) and before.checksum != job.header.checksum:
            garbage += self.names(job.piece.identity, before)
        return Outcome.DONE

    def headers(self, link: Connection, identities: Sequence[Identity], until_s: float) -> Iterator[Header | Outcome]:
        """What the header keys say; all of them are asked for at once."""
        link.send([b"".join([command(self._get, self.header_name(it), *self._expiry) for it in identities])], until_s)
        page = memoryview(bytearray(PAGE_BYTES))
        for _ in identities:
            found = link.receive(page, until_s)
            if found is not Received.VALUE:
                yield self._absent(found)
            else:
                header = read_header(page)
                yield header.value if isinstance(header, Unreadable) else header

    def _absent(self, found: Received | ServerError) -> Outcome:
        """What it means that a key did not hold a string of the right length."""
        if isinstance(found, ServerError):
            return Outcome.CORRUPT if found.code == "WRONGTYPE" else self._failure(found)
        return Outcome.MISSING if found is Received.NOTHING else Outcome.CORRUPT

    def _failure(self, reply: Reply) -> Outcome:
        """What an error reply means for one chunk. Raises UnavailableError where it is about the server."""
        if not isinstance(reply, ServerError):
            raise UnavailableError(f"{self._name} gave no answer to the question")
        if reply.code in BROKEN:
            raise UnavailableError(f"{self._name}: {explain(reply)}")
        return Outcome.FULL if reply.code == "OOM" else Outcome.FAILED

    def unlink(self, link: Connection, names: Sequence[bytes], until_s: float) -> None:
        """Remove keys, none of which need exist."""
        if names:
            link.send([command(b"UNLINK", *names)], until_s)
            reply = link.reply(until_s)
            if isinstance(reply, ServerError):
                self._failure(reply)

    def questions(self, identities: Sequence[Identity]) -> bytes:
        """Whether chunks exist, asked one by one in one message."""
        starts: dict[tuple[bytes, int], bytes] = {}
        parts: list[bytes] = []
        for it in identities:
            where = it.origin.root, it.group
            start = starts.get(where)
            if start is None:
                name = self.header_name(it)
                start = b"*2\r\n$6\r\nEXISTS\r\n$%d\r\n" % len(name)
                start = starts[where] = start + name[: -len(it.key.hex()) - len(HEADER_END)]
            parts.append(start + hexlify(it.key) + HEADER_END)
        return b"\r\n".join(parts) + b"\r\n"

    def pattern(self, origin: Origin) -> bytes:
        """What matches the keys of a namespace, and nothing else."""
        return f"{self.prefix}{origin.root.hex()}:*".encode()

    def header_name(self, identity: Identity) -> bytes:
        """The key that says that a chunk is there."""
        return self._base(identity) + HEADER_END

    def _base(self, identity: Identity) -> bytes:
        return f"{self.prefix}{identity.origin.root.hex()}:{identity.group}:{identity.key.hex()}".encode()

    def names(self, identity: Identity, header: Header) -> list[bytes]:
        """The keys of the pieces that a header speaks of; not more than this identity can have."""
        stored_bytes = min(header.encoded.stored_bytes, self._codec.stored_bytes(identity))
        base = self._base(identity) + b":" + header.checksum[:8].hex().encode()
        return [b"%s:%d" % (base, at) for at in range(-(-stored_bytes // PIECE_BYTES))]
