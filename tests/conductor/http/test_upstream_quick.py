"""A body that its sink takes with its framing: it is asked between chunks only, and silence is noticed all the same."""

from __future__ import annotations

import asyncio

from tests.conductor.http.rig import Script, Sink, instance, looped, passing, pooled, read_request, until

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
CHUNK = b"5\r\nhello\r\n"


class Quick(Sink):
    """Takes what it likes."""

    def __init__(self, answer: int = 1) -> None:
        super().__init__()
        self.taken: list[bytes] = []
        self.asked = 0

        def quick(raw: bytes) -> int:
            if raw != CHUNK:
                return 0
            self.taken.append(raw)
            return answer

        self.quick = quick

    def data(self, data: bytes) -> None:
        """See `Sink`."""
        if data:
            super().data(data)
        else:
            self.asked += 1


def pieces(*given: bytes, pause_s: float = 0.02) -> Script:
    """An instance that writes these one by one, and then nothing."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        for piece in given:
            writer.write(piece)
            await passing(pause_s)
        await reader.read()

    return script


def test_between_chunks_the_sink_is_asked_first() -> None:
    async def run() -> None:
        given = [HEAD + CHUNK, CHUNK, CHUNK[:4], CHUNK[4:], CHUNK, b"1;x=y\r\n.\r\n", CHUNK, b"0\r\n\r\n"]
        async with instance(pieces(*given)) as (_, origin), pooled() as pool:
            sink = Quick()
            pool.call(origin, "POST", "/", [], b"", sink, first_s=5)
            await until(lambda: sink.outcome)
            assert (sink.outcome, sink.taken) == ("end", [CHUNK] * 3)
            assert sink.body == b"hello" * 2 + b"." and sink.asked == 0
            assert len(pool._idle[origin]) == 1, "it can be used again"
            (link,) = pool._links
            link.data_received(CHUNK)
            assert sink.taken == [CHUNK] * 3, "it is nobody's any more"

    looped(run())


def test_a_sink_is_called_when_it_wants_a_word() -> None:
    async def run() -> None:
        async with instance(pieces(HEAD + CHUNK, CHUNK, CHUNK, b"0\r\n\r\n")) as (_, origin), pooled() as pool:
            sink = Quick(answer=2)
            pool.call(origin, "POST", "/", [], b"", sink, first_s=5)
            await until(lambda: sink.outcome)
            assert len(sink.taken) == sink.asked == 2

    looped(run())


def test_silence_counts_from_the_last_piece() -> None:
    async def run() -> None:
        script = pieces(HEAD + CHUNK, *[CHUNK] * 10, pause_s=0.1)
        async with instance(script) as (_, origin), pooled(silent_s=0.3) as pool:
            sink = Quick()
            began_s = pool.time()
            pool.call(origin, "POST", "/", [], b"", sink, first_s=5)
            await until(lambda: sink.outcome)
            assert (sink.outcome, len(sink.taken)) == ("silent", 10)
            assert pool.time() - began_s >= 1.0 + 0.3

    looped(run())


def test_a_paused_call_is_not_silent() -> None:
    async def run() -> None:
        async with instance(pieces(HEAD + CHUNK, CHUNK)) as (_, origin), pooled(silent_s=0.2) as pool:
            sink = Quick()
            call = pool.call(origin, "POST", "/", [], b"", sink, first_s=5)
            await until(lambda: sink.taken)
            call.pause()
            await passing(0.6)
            assert sink.outcome == ""
            call.resume()
            await until(lambda: sink.outcome)
            assert sink.outcome == "silent"

    looped(run())
