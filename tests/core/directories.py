"""Members, names and changes for tests of whatever speaks of a directory."""

from __future__ import annotations

import hashlib

from headwater.types import Announced, ChunkKey, Member, Tier, chunk_name

HOST, DISK = Tier.HOST, Tier.DISK


def name(number: int, group: int = 0) -> bytes:
    """A chunk's name; keys are spread like those of real chunks."""
    return chunk_name(group, ChunkKey(hashlib.sha256(b"%d" % number).digest()[:16]))


def member(node: str = "a", epoch: int = 1, address: str = "10.0.0.1:7420") -> Member:
    """A life of a node."""
    return Member(node, epoch, address, labels={"zone": "z1"}, host="h", version="1")


def stored(*numbers: int, tier: Tier = HOST) -> list[Announced]:
    """These chunks became readable."""
    return [Announced(name(it), tier, True) for it in numbers]


def removed(*numbers: int, tier: Tier = HOST) -> list[Announced]:
    """These chunks left."""
    return [Announced(name(it), tier, False) for it in numbers]
