"""The sockets under asyncio's transports."""

from __future__ import annotations

import asyncio


def socket_of(transport: asyncio.BaseTransport) -> int:
    """Its number, -1 if only the transport knows how to write to it: TLS, and what is no socket."""
    if transport.get_extra_info("sslcontext") is not None:
        return -1
    link = transport.get_extra_info("socket")
    return -1 if link is None else int(link.fileno())
