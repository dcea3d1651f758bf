"""Credentials come from files that only their owner can read, and never show."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headwater.errors import ConfigError
from headwater.transports.credentials import Credentials, load_credentials
from tests.transports.certificates import Authority

TOKEN = "0123456789abcdef"


def token_file(folder: Path, text: str, mode: int = 0o600) -> str:
    path = folder / "token"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        (TOKEN, (TOKEN,)),
        (f"\n  {TOKEN}  \r\n\n", (TOKEN,)),
        (f"{TOKEN}\n{TOKEN}2\n", (TOKEN, TOKEN + "2")),
    ],
)
def test_tokens(tmp_path: Path, text: str, tokens: tuple[str, ...]) -> None:
    found = load_credentials(token_file(tmp_path, text), "", "", "")
    assert found.tokens == tuple(it.encode() for it in tokens)
    assert found and found.server_tls is None
    assert TOKEN not in repr(found) and TOKEN not in str(found)


@pytest.mark.parametrize("text", ["", "\n \n", TOKEN[:-1], f"{TOKEN}\nshort", f"{TOKEN}\n" * 3, TOKEN * 1000])
def test_token_files_that_say_something_else(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"token_file=.*openssl rand") as caught:
        load_credentials(token_file(tmp_path, text), "", "", "")
    assert TOKEN not in str(caught.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o777])
def test_token_files_that_others_can_touch(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match=r"token_file=.*chmod 600"):
        load_credentials(token_file(tmp_path, TOKEN, mode), "", "", "")


def test_token_files_that_are_none(tmp_path: Path) -> None:
    real = token_file(tmp_path, TOKEN)
    link, fifo = tmp_path / "link", tmp_path / "fifo"
    link.symlink_to(real)
    os.mkfifo(fifo, 0o600)
    for path, why in (
        (link, "symbolic link"),
        (fifo, "no file"),
        (tmp_path, "no file"),
        (tmp_path / "gone", "No such"),
    ):
        with pytest.raises(ConfigError, match=f"token_file=.*{why}"):
            load_credentials(str(path), "", "", "")


def test_token_files_of_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = token_file(tmp_path, TOKEN)
    os.chown(path, 12345, -1) if os.geteuid() == 0 else pytest.skip("needs root to give a file away")
    with pytest.raises(ConfigError, match=r"token_file=.*user 12345.*chown"):
        load_credentials(path, "", "", "")


def test_nothing_is_nothing() -> None:
    assert not load_credentials("", "", "", "")
    assert not Credentials()


def test_certificates(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.files("node")
    found = load_credentials("", cert, key, str(authority.path))
    assert found and found.server_tls is not None and found.client_tls is not None
    other_cert, _ = authority.files("other")
    ca = str(authority.path)
    for words, field in (
        (("", key, ca), "tls_cert"),
        ((cert, "", ca), "tls_key"),
        ((cert, key, ""), "tls_ca"),
        ((other_cert, key, ca), "tls_cert"),
        ((cert, key, key), "tls_ca"),
        ((cert, key, "/none"), "tls_ca"),
    ):
        with pytest.raises(ConfigError, match=field):
            load_credentials("", *words)
    os.chmod(key, 0o644)
    with pytest.raises(ConfigError, match=r"tls_key=.*chmod 600"):
        load_credentials("", cert, key, ca)
