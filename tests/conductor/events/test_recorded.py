"""What a real vLLM 0.32 published, frame by frame: what is held before each request is what the engine then reused."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headwater.conductor.events.batches import read_batch
from headwater.conductor.sight import Sight
from headwater.fleet import Place
from headwater.fleetfile.model import InstanceSpec
from headwater.types import Tier

RECORD: dict[str, Any] = json.loads((Path(__file__).parent / "vllm_0_32.json").read_text())
PLACE = Place(Tier.DEVICE, 3)
NAMES = ["block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys"]


def as_it_is(payload: bytes) -> bytes:
    """A map for each event, names of 64 bits."""
    return payload


def as_arrays(payload: bytes) -> bytes:
    """As vLLM up to 0.23 wrote it: arrays, and here all names as bytes."""
    time_s, events, rank = msgspec.msgpack.decode(payload)
    told = []
    for event in events:
        names = NAMES if event["type"] == "BlockStored" else ["block_hashes", "medium"]
        told.append([event["type"], *(to_bytes(event[it]) if "hash" in it else event[it] for it in names)])
    return msgspec.msgpack.encode([time_s, told, rank])


def to_bytes(names: Any) -> Any:
    if isinstance(names, list):
        return [to_bytes(it) for it in names]
    return None if names is None else names.to_bytes(32, "big")


@pytest.mark.parametrize("form", [as_it_is, as_arrays])
@pytest.mark.parametrize("block_tokens", [None, 32])
def test_what_is_held_is_what_the_engine_reuses(form: Any, block_tokens: int | None) -> None:
    sight = Sight()
    device = sight.joined(3, InstanceSpec("e", "m", "m", block_tokens=block_tokens))
    for it in RECORD["requests"]:
        lenses = sight.lenses("m", it["salt"], it["ids"])
        assert sight.held("m", lenses).get(PLACE, 0) == it["cached_tokens"]
        for _, _, payload in RECORD["frames"][slice(*it["frames"])]:
            device.apply(0, read_batch(form(base64.b64decode(payload))))
    assert device.sums.malformed == device.sums.orphans == device.sums.foreign == 0
    # What is there in the end: the last prompt, and the first two blocks of the first one.
    assert device.hashes == len(sight.index) == 12


def test_a_salt_is_a_cache_of_its_own() -> None:
    sight = Sight()
    device = sight.joined(3, InstanceSpec("e", "m", "m"))
    for _, _, payload in RECORD["frames"][:4]:
        device.apply(0, read_batch(base64.b64decode(payload)))
    ids = RECORD["requests"][3]["ids"]
    held = {salt: sight.held("m", sight.lenses("m", salt, ids)) for salt in ("", "salty", "other")}
    assert held == {"": {PLACE: 128}, "salty": {PLACE: 128}, "other": {}}
