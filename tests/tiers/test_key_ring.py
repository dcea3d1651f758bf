"""A file of keys is taken only whole and from nobody else, and says nothing of its secrets."""

from __future__ import annotations

import base64
import json
import os
import traceback
from pathlib import Path

import pytest

from headwater.errors import ConfigError
from headwater.tiers.key_ring import LOOK_S, KeyRing
from tests.tiers.keys import Keys


@pytest.fixture
def file(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "keys.toml")


def test_the_first_key_of_a_tenant_writes_and_all_read(file: Keys) -> None:
    file.write(("b", "alice"), ("a", "alice"), ("all", "*"))
    ring = KeyRing.load(file.path)
    assert [getattr(ring.to_write(tenant), "id", None) for tenant in ("alice", "bob", "")] == ["b", "all", "all"]
    readable = [key_id for key_id in ("a", "b", "all", "c", "") if ring.to_read("alice", key_id)]
    assert readable == ["a", "b", "all"]
    assert ring.to_read("bob", "a") is None
    assert ring.to_write("alice") == ring.to_read("alice", "b")


def test_no_two_tenants_and_no_two_keys_are_alike(file: Keys) -> None:
    file.write(("b", "alice"), ("a", "alice"), ("all", "*"))
    ring = KeyRing.load(file.path)
    read = [ring.to_read(tenant, key_id) for tenant in ("alice", "bob") for key_id in ("a", "b", "all")]
    secrets = [key.secret for key in read if key] + [base64.b64decode(file.secret(it)) for it in ("a", "b", "all")]
    assert len(set(secrets)) == len(secrets) == 4 + 3
    assert {len(secret) for secret in secrets} == {32}


def test_a_ring_without_keys_is_legal(file: Keys) -> None:
    """The last key was taken out."""
    file.write()
    ring = KeyRing.load(file.path)
    assert ring.to_write("alice") is None


def test_json_says_the_same(file: Keys, tmp_path: Path) -> None:
    file.write(("a", "alice"))
    other = Keys(tmp_path / "keys.json")
    other.text(json.dumps({"key": [{"id": "a", "tenant": "alice", "secret": file.secret("a")}]}))
    assert KeyRing.load(other.path).to_write("alice") == KeyRing.load(file.path).to_write("alice")


SECRET = base64.b64encode(b"S" * 32).decode("ascii")
BAD = {
    "not TOML": ("[[key]\n", "not TOML"),
    "a secret without quotes": (f'[[key]]\nid = "a"\ntenant = "*"\nsecret = {SECRET}\n', "not TOML"),
    "no id": (f'[[key]]\ntenant = "*"\nsecret = "{SECRET}"\n', "`id`"),
    "an empty id": (f'[[key]]\nid = ""\ntenant = "*"\nsecret = "{SECRET}"\n', "id"),
    "a long id": (f'[[key]]\nid = "{"a" * 17}"\ntenant = "*"\nsecret = "{SECRET}"\n', "id"),
    "an id of other characters": (f'[[key]]\nid = "é"\ntenant = "*"\nsecret = "{SECRET}"\n', "ASCII"),
    "an id with a zero": (f'[[key]]\nid = "a\\u0000"\ntenant = "*"\nsecret = "{SECRET}"\n', "ASCII"),
    "an unknown field": (f'[[key]]\nid = "a"\ntenant = "*"\nsecret = "{SECRET}"\nold = true\n', "old"),
    "an unknown table": ("[[keys]]\n", "keys"),
    "a number for a tenant": (f'[[key]]\nid = "a"\ntenant = 1\nsecret = "{SECRET}"\n', "tenant"),
    "a short secret": ('[[key]]\nid = "a"\ntenant = "*"\nsecret = "U1NT"\n', r"key\[0\].*32 bytes"),
    "a long secret": (f'[[key]]\nid = "a"\ntenant = "*"\nsecret = "{SECRET[:-4]}U1NTU1NT"\n', "32 bytes"),
    "no base64": (f'[[key]]\nid = "a"\ntenant = "*"\nsecret = "{SECRET[:-4]}!!!!"\n', "32 bytes"),
    "other letters": ('[[key]]\nid = "a"\ntenant = "*"\nsecret = "üüüü"\n', "32 bytes"),
    "an id twice": (f'[[key]]\nid = "a"\ntenant = "*"\nsecret = "{SECRET}"\n' * 2, "'a' stands twice"),
    "a tenant's id among all's": (
        "".join(f'[[key]]\nid = "a"\ntenant = "{tenant}"\nsecret = "{SECRET}"\n' for tenant in ("*", "alice")),
        "'a' stands twice for tenant 'alice'",
    ),
    "too long": ("#" * (1 << 20) + "\n", "longer than"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_refused_without_a_word_of_their_secrets(file: Keys, case: str) -> None:
    text, why = BAD[case]
    file.text(text)
    with pytest.raises(ConfigError, match=why) as caught:
        KeyRing.load(file.path)
    told = "".join(traceback.format_exception(caught.value))
    assert str(file.path) in str(caught.value)
    assert SECRET[:8] not in told and "U1NT" not in told


def test_a_file_that_is_not_utf8_is_refused(file: Keys) -> None:
    file.text("")
    file.path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="UTF-8"):
        KeyRing.load(file.path)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o601, 0o644, 0o777])
def test_files_open_to_others_are_refused(file: Keys, mode: int) -> None:
    file.write(("a", "*"))
    file.path.chmod(mode)
    with pytest.raises(ConfigError, match=f"chmod 600 {file.path}"):
        KeyRing.load(file.path)


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_files_of_ours_alone_are_taken(file: Keys, mode: int) -> None:
    file.write(("a", "*"))
    file.path.chmod(mode)
    assert KeyRing.load(file.path).to_write("alice")


def test_another_users_file_is_refused(file: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write(("a", "*"))
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match=f"belongs to user {os.getuid()}.*chown"):
        KeyRing.load(file.path)


def test_what_is_no_file_is_refused(file: Keys, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        KeyRing.load(file.path)
    with pytest.raises(ConfigError, match="not a regular file"):
        KeyRing.load(tmp_path)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    with pytest.raises(ConfigError, match="not a regular file"):
        KeyRing.load(pipe)


def test_a_reload_that_fails_keeps_the_keys(file: Keys) -> None:
    file.write(("a", "*"))
    ring = KeyRing.load(file.path)
    before = ring.to_write("alice")
    file.text("[[key]\n")
    with pytest.raises(ConfigError, match="not TOML"):
        ring.reload()
    assert ring.to_write("alice") == before
    file.write(("b", "*"))
    ring.reload()
    assert ring.to_read("alice", "a") is None
    assert ring.to_write("alice") != before


class Hours:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_changed_file_is_read_at_the_next_use_and_looked_at_once_a_second(file: Keys) -> None:
    file.write(("a", "*"))
    clock = Hours()
    ring = KeyRing(file.path, clock)
    file.write(("b", "*"))
    clock.now_s += LOOK_S / 2
    assert ring.to_read("alice", "a") is not None, "it was looked at a moment ago"
    clock.now_s += LOOK_S / 2
    assert ring.to_read("alice", "a") is None
    written = ring.to_write("alice")
    assert written is not None and written.id == "b"
    file.write(("c", "*"), ("b", "*"))
    clock.now_s += LOOK_S
    now = ring.to_write("alice")
    assert now is not None and now.id == "c", "either use looks"
    assert ring.to_read("alice", "b") == written


def test_the_last_key_is_taken_out(file: Keys) -> None:
    file.write(("a", "*"))
    clock = Hours()
    ring = KeyRing(file.path, clock)
    file.write()
    clock.now_s += LOOK_S
    assert (ring.to_write("alice"), ring.to_read("alice", "a")) == (None, None)


@pytest.mark.parametrize("trouble", ["gone", "damaged", "open to others", "replaced by a directory"])
def test_what_cannot_be_read_or_trusted_changes_nothing_and_is_said_once(
    file: Keys, caplog: pytest.LogCaptureFixture, trouble: str
) -> None:
    file.write(("a", "*"))
    clock = Hours()
    ring = KeyRing(file.path, clock)
    before = ring.to_write("alice")
    if trouble in ("gone", "replaced by a directory"):
        file.path.unlink()
    if trouble == "replaced by a directory":
        file.path.mkdir()
    if trouble == "damaged":
        file.text("[[key]\nsecret = 's3cret'")
    if trouble == "open to others":
        file.path.chmod(0o644)
    for _ in range(3):
        clock.now_s += LOOK_S
        assert ring.to_write("alice") == before
    assert len(caplog.records) == 1
    assert "going on with the keys" in caplog.text
    assert "s3cret" not in caplog.text
    if file.path.is_dir():
        file.path.rmdir()
    file.write(("b", "*"))
    file.path.chmod(0o600)
    clock.now_s += LOOK_S
    now = ring.to_write("alice")
    assert now is not None and now.id == "b"


def test_no_repr_tells_a_secret(file: Keys) -> None:
    file.write(("a", "alice"), ("all", "*"))
    ring = KeyRing.load(file.path)
    assert repr(ring) == f"KeyRing({file.path}, {{'alice': 1, '*': 1}})"
    for tenant in ("alice", "bob"):
        key = ring.to_write(tenant)
        assert key is not None
        assert str(key.secret) not in repr(key) and key.secret.hex() not in repr(key)
        assert repr(key) == f"Key(id={key.id!r})"
