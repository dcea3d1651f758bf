"""The disk's directory: ours alone, one owner at a time, no way round by links or by removing files."""

import gc
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater.errors import ConfigError
from headwater.tiers import direct_io
from headwater.tiers.private_directory import OWNER, PrivateDirectory
from tests.node.conftest import needs_root
from tests.tiers.disks import descriptors


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Each test closes what it opened, whatever was refused."""
    gc.collect()  # what earlier tests left to it
    before = descriptors()
    yield
    # What other tests' threads were about to close may be gone by now, too.
    assert not Counter(descriptors()) - Counter(before)


def test_a_new_directory_is_private_and_counts_its_owners(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        for epoch in (1, 2, 3):
            it = PrivateDirectory(tmp_path / "a" / "kv", "disk")
            assert it.epoch == epoch
            assert (tmp_path / "a" / "kv").stat().st_mode & 0o7777 == 0o700
            assert (tmp_path / "a" / "kv" / OWNER).stat().st_mode & 0o7777 == 0o600
            assert it.names() == [OWNER]
            it.close()
    finally:
        os.umask(old)


def test_a_directory_that_is_open_to_others_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    """It was made for something else, and may be needed as it is."""
    for mode in (0o755, 0o710, 0o704, 0o720, 0o702, 0o777, 0o1777):
        tmp_path.chmod(mode)
        told = rf"disk={tmp_path}: its mode is {mode:04o}, open to others; name one .* as {tmp_path}/headwater, or"
        with pytest.raises(ConfigError, match=told):
            PrivateDirectory(tmp_path, "disk")
        assert tmp_path.stat().st_mode & 0o7777 == mode
        assert list(tmp_path.iterdir()) == []
    tmp_path.chmod(0o700)
    PrivateDirectory(tmp_path, "disk").close()


def test_a_directory_with_somebodys_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(ConfigError, match=rf"other files in it \('thesis.tex'\) .* as {tmp_path}/headwater"):
        PrivateDirectory(tmp_path, "disk")
    assert [it.name for it in tmp_path.iterdir()] == ["thesis.tex"]
    PrivateDirectory(tmp_path / "headwater", "disk").close()
    (tmp_path / "new file system" / "lost+found").mkdir(parents=True)
    (tmp_path / "new file system").chmod(0o700)
    PrivateDirectory(tmp_path / "new file system", "disk").close()
    (tmp_path / "headwater" / "thesis.tex").write_text("precious")
    PrivateDirectory(tmp_path / "headwater", "disk").close()


def test_another_users_directory_is_refused(tmp_path: Path) -> None:
    needs_root()
    os.chown(tmp_path, 65534, 65534)
    with pytest.raises(ConfigError, match="belongs to user 65534"):
        PrivateDirectory(tmp_path, "disk")


def test_a_link_or_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "file").write_text("")
    for name in ("link", "file", "file/below"):
        with pytest.raises(ConfigError, match=rf"disk={tmp_path / name}: .*it must be a directory, and no link"):
            PrivateDirectory(tmp_path / name, "disk")
    assert not list((tmp_path / "real").iterdir())


def test_a_second_owner_is_told_who_the_first_is(tmp_path: Path) -> None:
    first = PrivateDirectory(tmp_path, "disk")
    told = rf"another node \(pid {os.getpid()}, epoch 1\) owns it; stop that one or choose another directory"
    with pytest.raises(ConfigError, match=told):
        PrivateDirectory(tmp_path, "disk")
    (tmp_path / OWNER).unlink()
    with pytest.raises(ConfigError, match=r"another node \(pid \?, epoch \?\) owns it"):
        PrivateDirectory(tmp_path, "disk")
    first.close()
    PrivateDirectory(tmp_path, "disk").close()


def test_the_lock_dies_with_its_owner(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from headwater.tiers.private_directory import PrivateDirectory;"
        "it = PrivateDirectory(Path(sys.argv[1]), 'disk'); print('owned', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "owned\n"
        with pytest.raises(ConfigError, match=rf"pid {owner.pid}, epoch 1"):
            PrivateDirectory(tmp_path, "disk")
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    it = PrivateDirectory(tmp_path, "disk")
    assert it.epoch == 2
    it.close()


@pytest.mark.parametrize("text", [b"", b"x" * 100, b"0", b"-1 -1\n", b"1 two\n", bytes(30)])
def test_a_damaged_owner_file_only_restarts_the_count(tmp_path: Path, text: bytes) -> None:
    (tmp_path / OWNER).write_bytes(text)
    it = PrivateDirectory(tmp_path, "disk")
    assert it.epoch == 1
    it.close()
    it = PrivateDirectory(tmp_path, "disk")
    assert it.epoch == 2
    it.close()


@pytest.mark.parametrize("kind", ["link", "directory", "hard link", "pipe"])
def test_what_is_not_a_file_of_ours_alone_is_refused_and_left(tmp_path: Path, kind: str) -> None:
    directory = tmp_path / "kv"
    directory.mkdir(mode=0o700)
    (tmp_path / "foreign").write_text("precious")
    path = directory / OWNER
    if kind == "link":
        path.symlink_to(tmp_path / "foreign")
    elif kind == "hard link":
        path.hardlink_to(tmp_path / "foreign")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(ConfigError, match="owner in it is not a file of ours alone"):
        PrivateDirectory(directory, "disk")
    assert (tmp_path / "foreign").read_text() == "precious"
    assert os.path.lexists(path)


def test_a_link_that_appears_between_the_look_and_the_opening_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "foreign").write_text("precious")
    it = PrivateDirectory(tmp_path / "kv", "disk")
    (tmp_path / "kv" / "link").symlink_to(tmp_path / "foreign")
    for call in (
        lambda: direct_io.open_direct(it.descriptor, "link"),
        lambda: direct_io.open_at(it.descriptor, "link", os.O_RDONLY),
    ):
        with pytest.raises(OSError, match="symbolic links"):
            call()
    it.close()
