"""Asking a Conductor's control API, and the options that say where it is."""

from __future__ import annotations

import argparse
import http.client
import json
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from headwater.errors import ConfigError, UnavailableError
from headwater.fleetfile.model import ConductorSpec
from headwater.fleetfile.secrets import read_private

CALL_S = 5.0
ANSWER_BYTES = 64 << 20
PART_BYTES = 1 << 16
DEFAULT_URL = f"http://{ConductorSpec().control}"
TOKEN_FILE = "--token-file"

State = dict[str, Any]


def add_control(parser: argparse.ArgumentParser) -> None:
    """`--control URL`, `--token-file FILE`."""
    parser.add_argument(
        "--control", metavar="URL", default=DEFAULT_URL, help=f"conductor.control of the fleet (default: {DEFAULT_URL})"
    )
    parser.add_argument(
        TOKEN_FILE,
        metavar="FILE",
        help="conductor.control_token_file of the fleet, where it has one",
        dest="token_file",
    )


def fetch(arguments: argparse.Namespace, path: str) -> tuple[int, State]:
    """Status and JSON body of one GET. Neither proxies nor redirections are followed: the token goes where it was meant
    to go. Raises ConfigError for what the operator can mend in the command line, UnavailableError for the rest."""
    url = arguments.control
    connection = _connection(url)
    headers = {"Accept": "application/json"}
    if arguments.token_file is not None:
        headers["Authorization"] = f"Bearer {read_private(Path(arguments.token_file), TOKEN_FILE)}"
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        body = _read(answer, time.monotonic() + CALL_S)
    except (OSError, http.client.HTTPException) as error:
        said = getattr(error, "strerror", None) or type(error).__name__
        remedy = "start one with `headwater up FLEET.yaml`, or name it with --control"
        raise UnavailableError(f"no Conductor answers at {url} ({said}); {remedy}") from None
    finally:
        connection.close()
    if answer.status in (401, 403):
        raise ConfigError(f"{url} lets nobody in without its token; name its file with {TOKEN_FILE}")
    try:
        state = json.loads(body)
    except ValueError:
        state = None
    if not isinstance(state, dict):
        raise UnavailableError(f"what answers at {url} is no Conductor's control API: name `conductor.control`")
    return answer.status, state


def error_of(state: State) -> str:
    """What an error's answer says."""
    error = state.get("error")
    return str(error.get("message", "")) if isinstance(error, dict) else ""


def _connection(url: str) -> http.client.HTTPConnection:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or parts.scheme not in ("http", "https") or parts.username is not None or parts.path not in ("", "/"):
        raise ConfigError(f"--control: not http://HOST:PORT, as in {DEFAULT_URL}")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(host, port, timeout=CALL_S)


def _read(answer: http.client.HTTPResponse, deadline_s: float) -> bytes:
    parts: list[bytes] = []
    size = 0
    while part := answer.read1(PART_BYTES):
        parts.append(part)
        size += len(part)
        if size > ANSWER_BYTES or time.monotonic() > deadline_s:
            raise http.client.HTTPException
    return b"".join(parts)
