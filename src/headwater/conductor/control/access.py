"""Who may use the control API: everybody on this host, or whoever has the token.

Without a token it is on loopback only. That alone does not keep out web pages in a browser on this host: they can
post to 127.0.0.1, and with a name of their own that points there they can read. So what a browser sends across sites
(Origin) is refused, and so is a Host that is no loopback name. Probes are open, and say nothing but yes or no and why
not.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from pathlib import Path

from aiohttp import web

from headwater.conductor.control.replies import Handler, Rejected, reject
from headwater.errors import ConfigError
from headwater.fleetfile.model import ConductorSpec
from headwater.fleetfile.secrets import long_enough, read_private
from headwater.values import split_address

OPEN = frozenset(("/health", "/ready"))
TOKEN_BYTES = 4096
_SCHEME = "bearer "


class Access:
    """The check that every request passes."""

    def __init__(self, spec: ConductorSpec) -> None:
        """Reads the token; raises ConfigError for a control address that others reach without one."""
        where = "conductor.control_token_file"
        self._digest: bytes | None = None
        if spec.control_token_file is not None:
            token = long_enough(read_private(Path(spec.control_token_file), where), where)
            self._digest = hashlib.sha256(token.encode()).digest()
        elif not is_loopback(split_address(spec.control)[0]):
            raise ConfigError(
                f"conductor.control = {spec.control}: others can reach it, and it has no token; "
                f"use 127.0.0.1:PORT, or name a file with a token in {where}"
            )

    def __repr__(self) -> str:
        return "Access(by token)" if self._digest else "Access(this host)"

    @web.middleware
    async def check(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Let a request in, or not: before its path is looked up or its body read."""
        if request.path in OPEN:
            return await handler(request)
        try:
            self._judge(request)
        except Rejected as error:
            answer = reject(error)
            if error.status == 401:
                answer.headers["WWW-Authenticate"] = "Bearer"
            return answer
        return await handler(request)

    def _judge(self, request: web.Request) -> None:
        if self._digest is not None:
            given = request.headers.get("Authorization", "")
            token = given[len(_SCHEME) :].strip() if given[: len(_SCHEME)].lower() == _SCHEME else ""
            digest = hashlib.sha256(token[:TOKEN_BYTES].encode(errors="surrogateescape")).digest()
            if not hmac.compare_digest(self._digest, digest):
                raise Rejected(401, "no_token", "send Authorization: Bearer with the control token")
        elif "Origin" in request.headers:
            raise Rejected(403, "cross_site", "what a web page sends is not served here")
        elif not is_loopback(_host_of(request.headers.get("Host", ""))):
            raise Rejected(403, "wrong_host", "use a loopback address or localhost in the URL")


def is_loopback(host: str) -> bool:
    """Whether only this host can mean this."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _host_of(header: str) -> str:
    if header.startswith("["):
        return header.partition("]")[0] + "]"
    return header.partition(":")[0]
