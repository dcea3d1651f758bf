"""Checks of the tiers below DRAM: is the disk's directory ours and roomy, do the remotes answer, are codecs usable?"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from headwater.config import NodeConfig, slab_of_disk
from headwater.doctor.findings import Finding, Verdict
from headwater.errors import ConfigError, HeadwaterError
from headwater.places import DiskSpec, RemoteSpec, parse_disk, parse_remote
from headwater.tiers.codec import Codec
from headwater.tiers.codecs import make_codec
from headwater.tiers.private_directory import OWNER, choose_another, foreign
from headwater.tiers.redis import RedisTier
from headwater.tiers.remote import open_remote
from headwater.tiers.slab_files import RESERVE_BYTES, RESERVE_SHARE

REMOTE_S = 3.0
DISK = "disk"


def check_tiers(config: NodeConfig, *, node_runs: bool) -> Iterator[Finding]:
    """All checks of the lower tiers of a node with these settings; nothing where there are none."""
    if config.disk:
        disk = parse_disk(config.disk)
        yield from check_disk(disk, config, node_runs=node_runs)
        codec = check_codec(DISK, disk.codec, config)
        if isinstance(codec, Finding):
            yield codec
        elif not codec.fixed:
            remedy = "its chunks have no fixed size, which slots of a disk need: use another codec there"
            yield Finding(f"{DISK} codec", Verdict.FAIL, disk.codec, remedy)
    for url in config.remotes:
        remote = parse_remote(url)
        remote_codec = check_codec(remote.name, remote.codec, config)
        yield remote_codec if isinstance(remote_codec, Finding) else check_remote(remote, remote_codec)


def check_codec(tier: str, name: str, config: NodeConfig) -> Codec | Finding:
    """The codec of a tier, or why it cannot be used."""
    try:
        return make_codec(name, Path(config.keys) if config.keys else None)
    except ConfigError as error:
        return Finding(f"{tier} codec", Verdict.FAIL, name, str(error))


# ---- disk ---------------------------------------------------------------------------------------------------


def check_disk(spec: DiskSpec, config: NodeConfig, *, node_runs: bool) -> Iterator[Finding]:
    """The directory of the DISK tier: whose it is, what its file system can do, and whether there is room."""
    directory = Path(spec.path)
    owner = check_owner(directory)
    yield owner
    if owner.verdict is Verdict.FAIL:
        return
    there = next(it for it in (directory, *directory.parents) if it.exists())
    yield check_direct_io(there)
    yield check_room(there, spec.size_bytes, config, node_runs=node_runs)


def check_owner(directory: Path) -> Finding:
    """Whether a node may keep its files here, and nobody else can change them."""
    try:
        found = directory.lstat()
    except FileNotFoundError:
        parent = next(it for it in directory.parents if it.exists())
        if os.access(parent, os.W_OK | os.X_OK):
            return Finding(DISK, Verdict.OK, f"{directory} will be created")
        remedy = f"create it with mode 0700 for this user; {parent} is not writable"
        return Finding(DISK, Verdict.FAIL, f"{directory} is missing", remedy)
    except OSError as error:
        return Finding(DISK, Verdict.FAIL, f"{directory}: {error.strerror}", "choose another node.disk")
    mode = f"{directory}, mode {stat.S_IMODE(found.st_mode):04o}, owner {found.st_uid}"
    if not stat.S_ISDIR(found.st_mode):
        return Finding(DISK, Verdict.FAIL, mode, "a link or a file; name the directory itself in node.disk")
    if found.st_uid != os.geteuid():
        return Finding(DISK, Verdict.FAIL, mode, "it is another user's; choose a directory of this user's")
    if found.st_mode & 0o077:
        what = f"it is open to others: {choose_another(directory)}, or chmod 700 {directory}"
        return Finding(DISK, Verdict.FAIL, mode, what)
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        return Finding(DISK, Verdict.FAIL, mode, f"this user cannot write there: chmod 700 {directory}")
    if not (directory / OWNER).exists() and foreign(os.listdir(directory)):
        return Finding(
            DISK, Verdict.FAIL, mode, f"other files are in it and it is no node's: {choose_another(directory)}"
        )
    return Finding(DISK, Verdict.OK, mode)


def check_direct_io(directory: Path) -> Finding:
    """Whether files there can bypass the page cache; tried with a file that has no name."""
    name = f"{DISK} direct I/O"
    try:
        os.close(os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        if error.errno == errno.EINVAL:
            remedy = "chunks pass through the page cache, slower; use a local ext4 or xfs file system"
            return Finding(name, Verdict.WARN, f"{directory}: no O_DIRECT", remedy)
        return Finding(name, Verdict.OK, f"{directory}: cannot be told without writing ({error.strerror})")
    return Finding(name, Verdict.OK, f"{directory}: O_DIRECT")


def check_room(directory: Path, wanted: int, config: NodeConfig, *, node_runs: bool) -> Finding:
    """Whether the file system has that much for us, the reserve left alone."""
    name = f"{DISK} room"
    room = os.statvfs(directory)
    free, total = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
    reserve = config.disk_reserve
    if reserve is None:
        reserve = max(RESERVE_BYTES, int(total * RESERVE_SHARE))
    ours = _own_bytes(directory)
    usable = max(free + ours - reserve, 0)
    found = f"{free} bytes free and {ours} ours already, {reserve} stay free; node.disk asks for {wanted}"
    if usable >= wanted or (node_runs and ours):
        return Finding(name, Verdict.OK, found)
    slab_bytes = slab_of_disk(wanted, config.slab)
    if usable < slab_bytes:
        remedy = f"free some: not even one slab of {slab_bytes} bytes fits; or lower node.disk_reserve"
        return Finding(name, Verdict.FAIL, found, remedy)
    remedy = f"the node uses {usable >> 20}MiB only; free some, ask for less, or lower node.disk_reserve"
    return Finding(name, Verdict.WARN, found, remedy)


def _own_bytes(directory: Path) -> int:
    """What slab files take there already."""
    try:
        return sum(it.lstat().st_blocks * 512 for it in directory.glob("slabs-*"))
    except OSError:  # they come and go while a node runs
        return 0


# ---- remotes ------------------------------------------------------------------------------------------------


def check_remote(spec: RemoteSpec, codec: Codec) -> Finding:
    """Whether a REMOTE tier can be reached, lets us write, and how it treats what it holds."""
    if spec.scheme == "file" and not os.path.lexists(spec.path):
        parent = Path(spec.path).parent
        if os.access(parent, os.W_OK | os.X_OK):
            return Finding(spec.name, Verdict.OK, "the directory will be created")
        return Finding(spec.name, Verdict.FAIL, "no such directory", f"mount it or create it; {parent} is not writable")
    try:
        tier = open_remote(spec, codec)
    except ConfigError as error:
        return Finding(spec.name, Verdict.FAIL, "cannot be used", str(error))
    begun_s = time.monotonic()
    try:
        usage = tier.usage(begun_s + REMOTE_S)
    except HeadwaterError as error:
        remedy = "check address, credentials and network; the node starts without it and tries again by itself"
        return Finding(spec.name, Verdict.FAIL, str(error), remedy)
    finally:
        tier.close()
    size = "of unknown size" if usage.capacity_bytes is None else f"of {usage.capacity_bytes}"
    used = "" if usage.used_bytes is None else f", {usage.used_bytes} bytes used {size}"
    found = f"answers in {(time.monotonic() - begun_s) * 1e3:.0f} ms{used}"
    if isinstance(tier, RedisTier) and tier.warning:
        return Finding(spec.name, Verdict.WARN, found, tier.warning)
    return Finding(spec.name, Verdict.OK, found)
