"""The object-store tier on a real S3 server and on a directory: the contract, damage, and stores that are sick."""

from __future__ import annotations

import importlib.util
import itertools
import os
import random
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import obstore
import pytest
import xxhash

from headwater.errors import ConfigError, UnavailableError
from headwater.places import parse_remote
from headwater.ports import LowerTier, Piece
from headwater.tiers.header import VERSION
from headwater.tiers.object_store import MULTIPART_BYTES, ObjectStoreTier
from headwater.tiers.remote import open_remote
from headwater.types import PAGE_BYTES, Identity, KVGroup, KVLayout, Origin, Outcome
from tests.conformance.lower_tier import NAMESPACE, LowerTierSuite, identity, memory_of, soon
from tests.node.conftest import eventually, needs_root
from tests.servers import ACCESS_KEY, BUCKET, SECRET_KEY, free_port

FLIPS = 2400
_prefixes = itertools.count()


def opened(url: str) -> ObjectStoreTier:
    tier = open_remote(parse_remote(url))
    assert isinstance(tier, ObjectStoreTier)
    return tier


def piece(it: Identity, seed: int | None = None) -> Piece:
    return Piece(it, memory_of(it, seed))


def read(tier: LowerTier, it: Identity, seed: int = 1) -> Outcome:
    """What a read says; DONE is only ever said of the right bytes."""
    target = piece(it)
    [outcome] = tier.read([target], soon())
    assert outcome is not Outcome.DONE or np.array_equal(target.memory, memory_of(it, seed))
    return outcome


def s3_url(endpoint: str, prefix: str, secret: str = SECRET_KEY, bucket: str = BUCKET) -> str:
    return f"s3://{ACCESS_KEY}:{secret}@{bucket}/{prefix}?endpoint={endpoint}&region=us-east-1"


@pytest.fixture
def bucket(s3_endpoint: str) -> Iterator[ObjectStoreTier]:
    """A tier with a prefix of its own in a real bucket."""
    tier = opened(s3_url(s3_endpoint, f"prefix/{next(_prefixes)}"))
    yield tier
    tier.close()


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[ObjectStoreTier]:
    tier = opened(f"file://{tmp_path}/kv")
    yield tier
    tier.close()


def files(folder: Path) -> list[Path]:
    return sorted(it for it in folder.rglob("*") if it.is_file())


class TestS3(LowerTierSuite):
    @pytest.fixture
    def tier(self, bucket: ObjectStoreTier) -> LowerTier:
        return bucket


# ---- how it lies there -----------------------------------------------------------------------------------


def test_one_file_for_each_chunk_and_nothing_else(directory: ObjectStoreTier, tmp_path: Path) -> None:
    chunks = [identity(number, group) for number in range(2) for group in range(4)]
    for seed in (1, 2):
        assert directory.write([piece(it, seed) for it in chunks], soon()) == [Outcome.DONE] * len(chunks)
    directory.usage(soon())
    root = chunks[0].origin.root.hex()
    for it in chunks:
        path = tmp_path / "kv/default/none" / root[:2] / root / str(it.group) / it.key.hex()
        assert path.stat().st_size == PAGE_BYTES + it.length_bytes
    assert len(files(tmp_path)) == len(chunks)
    directory.delete(chunks, soon())
    assert files(tmp_path) == []


@pytest.mark.parametrize("extra_pages", [-1, 0, 1])
def test_large_chunks_go_in_parts_and_come_back_whole(bucket: ObjectStoreTier, extra_pages: int) -> None:
    """Around the size from which objects are sent in parts."""
    layout = KVLayout(16, (KVGroup(16, MULTIPART_BYTES + extra_pages * PAGE_BYTES, (1,)),))
    it = identity(1, 0, Origin.of(NAMESPACE, layout))
    assert bucket.write([piece(it, 1)], soon()) == [Outcome.DONE]
    assert read(bucket, it) is Outcome.DONE


def test_clusters_do_not_see_each_other(tmp_path: Path) -> None:
    tiers = [opened(f"file://{tmp_path}?cluster={name}") for name in ("a", "b")]
    for at, it in enumerate(tiers):
        assert it.holds([identity(1)], soon()) == [False]
        it.write([piece(identity(1), at)], soon())
    for at, it in enumerate(tiers):
        assert read(it, identity(1), at) is Outcome.DONE
        it.close()


# ---- bytes that are wrong --------------------------------------------------------------------------------


def test_every_flipped_bit_is_found(directory: ObjectStoreTier, tmp_path: Path, seed: int) -> None:
    """In header pages and payloads; each flip is put right before the next."""
    rng = random.Random(seed)
    chunks = [identity(1, 0), identity(2, 1)]
    directory.write([piece(it, 1) for it in chunks], soon())
    flips = 0
    for it in chunks:
        [path] = [path for path in files(tmp_path) if path.name == it.key.hex()]
        size = path.stat().st_size
        bits = rng.sample(range(PAGE_BYTES * 8), FLIPS // 4) + rng.sample(range(PAGE_BYTES * 8, size * 8), FLIPS // 4)
        with path.open("r+b", buffering=0) as file:
            for bit in bits:
                was = os.pread(file.fileno(), 1, bit // 8)
                os.pwrite(file.fileno(), bytes([was[0] ^ 1 << bit % 8]), bit // 8)
                assert read(directory, it) in (Outcome.CORRUPT, Outcome.FOREIGN), f"seed {seed}: {path.name} bit {bit}"
                os.pwrite(file.fileno(), was, bit // 8)
                flips += 1
    assert flips >= 2000
    assert [read(directory, it) for it in chunks] == [Outcome.DONE] * 2


def test_damage_in_the_bucket_is_found(bucket: ObjectStoreTier, seed: int) -> None:
    """Flipped, truncated, extended, zeroed, empty: as another client of the bucket would do it."""
    rng, it = random.Random(seed), identity(1, 1)
    bucket.write([piece(it, 1)], soon())
    store, path = bucket._store, bucket._path(it)
    whole = bytes(obstore.get(store, path).bytes())
    versions = [whole[:-1], whole[:PAGE_BYTES], whole[:100], whole + b"\0", bytes(len(whole)), b"", whole[PAGE_BYTES:]]
    versions.append(whole[:PAGE_BYTES] + bytes(len(whole) - PAGE_BYTES))
    for bit in rng.sample(range(len(whole) * 8), 150):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        versions.append(bytes(flipped))
    for number, content in enumerate(versions):
        obstore.put(store, path, content)
        assert read(bucket, it) in (Outcome.CORRUPT, Outcome.FOREIGN), f"seed {seed}, version {number}"
    obstore.put(store, path, whole)
    assert read(bucket, it) is Outcome.DONE


@pytest.mark.parametrize("content", ["", "x", "zeros", "short", "long", "huge", "pickle", "directory"])
def test_other_things_in_place_of_a_chunk_are_not_taken_for_it(
    directory: ObjectStoreTier, tmp_path: Path, content: str
) -> None:
    it, beside = identity(5, 1), identity(6, 1)
    directory.write([piece(it, 1), piece(beside, 1)], soon())
    [path] = [path for path in files(tmp_path) if path.name == it.key.hex()]
    size = path.stat().st_size
    if content == "directory":
        path.unlink()
        path.mkdir()
        wanted = (Outcome.MISSING, Outcome.FAILED, Outcome.CORRUPT)
    else:
        value = {"zeros": bytes(size), "short": bytes(size - 1), "long": bytes(size + 1)}.get(content, content.encode())
        path.write_bytes(value)
        if content == "huge":
            os.truncate(path, 1 << 40)
        wanted = (Outcome.CORRUPT,)
    pieces = [piece(beside), piece(it), piece(beside)]
    outcomes = directory.read(pieces, soon())
    assert outcomes[::2] == [Outcome.DONE] * 2
    assert outcomes[1] in wanted
    if content != "directory":
        directory.delete([it], soon())
        assert read(directory, it) is Outcome.MISSING
        assert directory.write([piece(it, 1)], soon()) == [Outcome.DONE]
        assert read(directory, it) is Outcome.DONE


def test_swapped_newer_and_foreign_ones(directory: ObjectStoreTier, tmp_path: Path) -> None:
    chunks = [identity(number, 1) for number in (1, 2)]
    directory.write([piece(it, 1) for it in chunks], soon())
    paths = [next(path for path in files(tmp_path) if path.name == it.key.hex()) for it in chunks]
    one, other = (path.read_bytes() for path in paths)
    paths[0].write_bytes(other)
    paths[1].write_bytes(one)
    assert [read(directory, it) for it in chunks] == [Outcome.FOREIGN] * 2
    page = bytearray(one[:PAGE_BYTES])
    struct.pack_into("<H", page, 8, VERSION + 1)
    struct.pack_into("<Q", page, PAGE_BYTES - 8, xxhash.xxh3_64_intdigest(bytes(page[:-8])))
    paths[0].write_bytes(bytes(page) + one[PAGE_BYTES:])
    assert read(directory, chunks[0]) is Outcome.NEWER
    assert paths[0].exists()
    paths[0].write_bytes(one)
    paths[1].write_bytes(other)
    assert [read(directory, it) for it in chunks] == [Outcome.DONE] * 2


def test_deleted_under_our_feet_it_is_missing(directory: ObjectStoreTier, tmp_path: Path) -> None:
    directory.write([piece(identity(1), 1)], soon())
    for path in files(tmp_path):
        path.unlink()
    assert read(directory, identity(1)) is Outcome.MISSING
    assert directory.holds([identity(1)], soon()) == [False]


# ---- room ------------------------------------------------------------------------------------------------


def file_system(total_bytes: int, free_bytes: int) -> SimpleNamespace:
    return SimpleNamespace(f_frsize=4096, f_blocks=total_bytes // 4096, f_bavail=free_bytes // 4096)


@pytest.mark.parametrize(
    ("total_gib", "free_gib", "outcome"),
    [(100, 6, Outcome.DONE), (100, 4.99, Outcome.FULL), (10, 1.1, Outcome.DONE), (10, 0.9, Outcome.FULL)],
)
def test_the_last_twentieth_and_the_last_gib_are_not_ours(
    directory: ObjectStoreTier, monkeypatch: pytest.MonkeyPatch, total_gib: int, free_gib: float, outcome: Outcome
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: file_system(total_gib << 30, int(free_gib * (1 << 30))))
    assert directory.write([piece(identity(1), 1)] * 2, soon()) == [outcome] * 2
    usage = directory.usage(soon())
    assert usage.capacity_bytes is not None
    assert usage.used_bytes is not None
    assert (usage.used_bytes >= usage.capacity_bytes) == (outcome is Outcome.FULL)


@pytest.mark.parametrize("text", ["No space left on device (os error 28)", "Disk quota exceeded (os error 122)"])
def test_a_file_system_that_is_full_says_so(
    directory: ObjectStoreTier, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    async def full(*_: object, **__: object) -> None:
        raise obstore.exceptions.GenericError(f"Generic LocalFileSystem error: Unable to copy data to file: {text}")

    monkeypatch.setattr(obstore, "put_async", full)
    assert directory.write([piece(identity(1), 1)], soon()) == [Outcome.FULL]


def test_a_file_server_that_hangs_costs_the_deadline_and_one_thread(
    directory: ObjectStoreTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go = threading.Event()
    real = os.statvfs(".")
    monkeypatch.setattr(os, "statvfs", lambda _: (let_go.wait(), real)[1])
    before = threading.active_count()
    for _ in range(3):
        begun_s = time.monotonic()
        with pytest.raises(UnavailableError):
            directory.usage(soon(0.1))
        with pytest.raises(UnavailableError):
            directory.write([piece(identity(1), 1)], soon(0.1))
        assert time.monotonic() - begun_s < 0.5
    assert threading.active_count() == before + 1
    let_go.set()
    assert directory.usage(soon()).capacity_bytes is not None


# ---- directories that we do not use ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "alone", "shared"),
    [
        (0o777, "everybody", "everybody"),
        (0o755, "everybody", "everybody"),
        (0o701, "everybody", "everybody"),
        (0o770, "its group", None),
        (0o2750, "its group", None),
        (0o700, None, None),
    ],
)
def test_a_directory_is_for_us_alone_or_for_its_group_if_so_said(
    tmp_path: Path, mode: int, alone: str | None, shared: str | None
) -> None:
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv").chmod(mode)
    for option, why in (("", alone), ("?shared=true", shared)):
        if why:
            with pytest.raises(ConfigError, match=rf"{why} may look or write there \(mode {mode:04o}\)"):
                opened(f"file://{tmp_path}/kv{option}")
        else:
            opened(f"file://{tmp_path}/kv{option}").close()
        assert (tmp_path / "kv").stat().st_mode & 0o7777 == mode, "and is left as it is"


def test_another_users_directory_is_refused(tmp_path: Path) -> None:
    needs_root()
    os.chown(tmp_path, 65534, -1)
    with pytest.raises(ConfigError, match="it is user 65534's"):
        opened(f"file://{tmp_path}")
    opened(f"file://{tmp_path}?shared=true").close()


@pytest.mark.parametrize(("option", "folder_mode", "file_mode"), [("", 0o700, 0o600), ("?shared=true", 0o2770, None)])
def test_what_is_written_is_nobody_elses(tmp_path: Path, option: str, folder_mode: int, file_mode: int | None) -> None:
    """Whatever the umask; where the group shares it, files are as the umask says."""
    for umask in (0o000, 0o022, 0o027):
        before = os.umask(umask)
        try:
            tier = opened(f"file://{tmp_path}/kv{umask}{option}")
            try:
                assert tier.write([piece(identity(at), 1) for at in range(3)], soon()) == [Outcome.DONE] * 3
                tier.usage(soon())
                assert read(tier, identity(0)) is Outcome.DONE
            finally:
                tier.close()
        finally:
            os.umask(before)
        made = [tmp_path / f"kv{umask}", *(tmp_path / f"kv{umask}").rglob("*")]
        assert {it.stat().st_mode & 0o7777 for it in made if it.is_dir()} == {folder_mode}
        modes = {it.stat().st_mode & 0o7777 for it in made if it.is_file()}
        assert modes == {0o666 & ~umask if file_mode is None else file_mode}


def test_folders_that_were_removed_are_made_again(directory: ObjectStoreTier, tmp_path: Path) -> None:
    assert directory.write([piece(identity(1), 1)], soon()) == [Outcome.DONE]
    shutil.rmtree(tmp_path / "kv" / "default")
    assert directory.write([piece(identity(1), 1)], soon()) == [Outcome.DONE]
    assert read(directory, identity(1)) is Outcome.DONE


def test_a_link_a_file_and_a_place_that_is_not_mounted_are_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").write_text("")
    for name, why in (("link", "symbolic link"), ("file", r"exists|no directory"), ("not/there", "mounted")):
        with pytest.raises(ConfigError, match=why):
            open_remote(parse_remote(f"file://{tmp_path}/{name}"))


def test_a_directory_of_our_own_is_for_us_alone(tmp_path: Path) -> None:
    open_remote(parse_remote(f"file://{tmp_path}/new")).close()
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


def test_without_the_library_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'headwater\[object-store\]'"):
        open_remote(parse_remote("s3://bucket/x"))
    open_remote(parse_remote("redis://127.0.0.1:1")).close()


def test_the_library_is_not_needed_to_start() -> None:
    code = "import sys; sys.modules['obstore'] = sys.modules['redis'] = None; import headwater.tiers.remote"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("url", ["gs://bucket/p", "az://box/p?account=acc", "s3://bucket/x?region=eu-1"])
def test_other_stores_open_without_a_word_to_them(url: str) -> None:
    opened(url).close()


def test_a_store_that_cannot_be_opened_is_a_matter_of_configuration() -> None:
    with pytest.raises(ConfigError, match="az://box"):
        open_remote(parse_remote("az://:secret@box/p"))


# ---- stores that are sick --------------------------------------------------------------------------------


def all_calls(tier: ObjectStoreTier, within_s: float) -> list[float]:
    """How long each call took to say that the store is not there."""
    took = []
    for call in (
        lambda: tier.holds([identity(1), identity(2)], soon(within_s)),
        lambda: tier.read([piece(identity(1)), piece(identity(2))], soon(within_s)),
        lambda: tier.write([piece(identity(1), 1), piece(identity(2), 1)], soon(within_s)),
        lambda: tier.delete([identity(1)], soon(within_s)),
        lambda: tier.clear(identity(1).origin, soon(within_s)),
        lambda: tier.usage(soon(within_s)),
    ):
        begun_s = time.monotonic()
        with pytest.raises(UnavailableError) as told:
            call()
        assert SECRET_KEY not in str(told.value)
        took.append(time.monotonic() - begun_s)
    return took


def test_one_that_accepts_and_never_answers_costs_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tier = opened(s3_url(f"http://127.0.0.1:{silent.getsockname()[1]}", "p"))
        assert max(all_calls(tier, 0.2)) < 0.6
        begun_s = time.monotonic()
        tier.close()
        assert time.monotonic() - begun_s < 0.5


def test_nobody_listens() -> None:
    tier = opened(s3_url(f"http://127.0.0.1:{free_port()}", "p"))
    assert max(all_calls(tier, 5)) < 3
    tier.close()


def test_a_probe_writes_once_and_again_after_each_failure(
    bucket: ObjectStoreTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes cost money in a bucket; a store that is well is only asked."""
    puts = []
    real = obstore.put_async

    async def counted(store: object, path: str, content: bytes, **options: int) -> object:
        puts.append(path)
        return await real(store, path, content, **options)

    monkeypatch.setattr(obstore, "put_async", counted)
    for _ in range(4):
        bucket.usage(soon())
    assert len(puts) == 1
    with pytest.raises(UnavailableError):
        bucket.read([piece(identity(1))], soon(0.0005))
    for _ in range(4):
        bucket.usage(soon())
    assert len(puts) == 2
    obstore.delete(bucket._store, puts[0])
    bucket.usage(soon())
    assert len(puts) == 3, "the probe itself was deleted"


def test_wrong_credentials_are_said_without_being_shown(s3_endpoint: str) -> None:
    url = s3_url(s3_endpoint, "p", secret="wr0ng-word")
    spec = parse_remote(url)
    tier = opened(url)
    for call in (
        lambda: tier.write([piece(identity(1), 1)], soon()),
        lambda: tier.read([piece(identity(1))], soon()),
        lambda: tier.usage(soon()),
    ):
        with pytest.raises(UnavailableError) as told:
            call()
        for text in (str(told.value), repr(spec), str(spec), spec.name, repr(tier)):
            assert "wr0ng" not in text
            assert ACCESS_KEY not in text
    tier.close()


def test_what_was_late_is_not_written_half(bucket: ObjectStoreTier) -> None:
    """Whatever became of a write that was cut off: what is there is whole."""
    layout = KVLayout(16, (KVGroup(16, 8 << 20, (1,)),))
    for number in range(12):
        it = identity(number, 0, Origin.of(NAMESPACE, layout))
        memory = memory_of(it, 1)
        try:
            outcome = bucket.write([Piece(it, memory)], soon(0.002 * 2 ** (number % 8)))[0]
        except UnavailableError:
            outcome = Outcome.FAILED
        memory[:] = 0xEE  # HOST memory belongs to others now
        found = read(bucket, it)
        assert found in ((Outcome.DONE,) if outcome is Outcome.DONE else (Outcome.DONE, Outcome.MISSING))


def test_threads_and_tasks_end_with_the_tier(tmp_path: Path) -> None:
    before = threading.active_count()
    for _ in range(5):
        tier = opened(f"file://{tmp_path}/kv")
        tier.write([piece(identity(1), 1)], soon())
        tier.close()
        tier.close()
    # What a call was carried out by lives a moment longer than the call.
    eventually(lambda: threading.active_count() == before)
