"""Mooncake's indexer API: the fields of its four requests, and what a worker needs to serve them.

The words are Mooncake's (its Conductor's API, and the KV indexer proposal that others follow), so that gateways which
ask theirs can ask ours. What we do not have is refused by its name and not passed over: LoRA adapters in the index.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Protocol, TypeVar

import msgspec

from headwater.conductor.control.replies import Rejected

DEFAULT_TENANT = "default"
"""What Mooncake calls the tenant of those who name none."""
TOKENS = 1 << 20
REGISTER_BYTES = 16 << 10
QUERY_BYTES = 16 << 20
FIELD_SHOWN = 64

Name = Annotated[str, msgspec.Meta(max_length=256)]
Given = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_HOST = r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)"
Endpoint = Annotated[str, msgspec.Meta(pattern=rf"^tcp://{_HOST}:[0-9]{{1,5}}\Z", max_length=300)]
Url = Annotated[str, msgspec.Meta(pattern=rf"^https?://{_HOST}(:[0-9]{{1,5}})?/?\Z", max_length=300)]
BlockTokens = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
Rank = Annotated[int, msgspec.Meta(ge=0, le=4095)]
Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
Hash = int | Annotated[str, msgspec.Meta(pattern=r"^(0[xX])?[0-9A-Fa-f]{1,64}\Z", max_length=66)]


class Publisher(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`POST /register`: who publishes KV events of which instance. Two fields are ours: `url`, where it serves
    (needed unless it is known already), and `ranks`, how many it has."""

    endpoint: Endpoint
    type: Given
    modelname: Given
    instance_id: Given
    block_size: BlockTokens
    dp_rank: Rank = 0
    replay_endpoint: Endpoint | None = None
    lora_name: Name | None = None
    tenant_id: Given = DEFAULT_TENANT
    additionalsalt: Name | None = None
    url: Url | None = None
    ranks: Annotated[int, msgspec.Meta(ge=1, le=4096)] | None = None


class Gone(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`POST /unregister`: by (instance, tenant, rank), as Mooncake does; without a rank all of them."""

    instance_id: Given
    tenant_id: Given = DEFAULT_TENANT
    dp_rank: Rank | None = None
    type: Name | None = None
    modelname: Name | None = None
    block_size: BlockTokens | None = None
    lora_name: Name | None = None
    endpoint: Name | None = None
    replay_endpoint: Name | None = None
    additionalsalt: Name | None = None


class Query(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`POST /query`: who holds how much of these tokens."""

    model: Given
    token_ids: Annotated[list[Token], msgspec.Meta(max_length=TOKENS)]
    block_size: BlockTokens
    tenant_id: Given = DEFAULT_TENANT
    instance_id: Given | None = None
    cache_salt: Name | None = None
    lora_name: Name | None = None
    lora_id: int | None = None


class HashQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`POST /query_by_hash`: the same by the hashes that engines announce, whole numbers or hex."""

    model: Given
    block_size: BlockTokens
    seq_hashes: Annotated[list[Hash], msgspec.Meta(max_length=TOKENS)] | None = None
    block_hash: Annotated[list[Hash], msgspec.Meta(max_length=TOKENS)] | None = None
    tenant_id: Given = DEFAULT_TENANT
    instance_id: Given | None = None
    cache_salt: Name | None = None
    lora_name: Name | None = None
    lora_id: int | None = None


Asked = TypeVar("Asked", Publisher, Gone, Query, HashQuery)


class Indexed(Protocol):
    """What `Sight` offers beside `parts.Sight`, in Mooncake's words: by instance, {longest_matched, GPU, CPU, DISK,
    DP}. What is not known is just not in the answer."""

    def query(self, model: str, ids: Sequence[int], salt: str = "") -> dict[str, dict[str, Any]]:
        """Who holds how many tokens of a prompt."""

    def query_by_hash(self, hashes: Sequence[int | bytes]) -> dict[str, dict[str, Any]]:
        """The same by the engines' own rolling hashes, of every instance."""


def read(body: bytes, kind: type[Asked]) -> Asked:
    """A request's fields; raises Rejected, which names the field and repeats no value."""
    try:
        asked = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _rejected(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise Rejected(400, "not_json", "the body is not a JSON object") from None
    if not isinstance(asked, Gone) and (asked.lora_name or getattr(asked, "lora_id", None)):
        raise Rejected(422, "refused", "LoRA adapters are not indexed; leave the field out", "lora_name")
    return asked


def hashes_of(asked: HashQuery) -> list[int | bytes]:
    """The hashes of a query, hex as bytes; raises Rejected."""
    if (asked.seq_hashes is None) == (asked.block_hash is None):
        raise Rejected(422, "missing_field", "name the hashes, once", "seq_hashes")
    return [_hash(it) for it in asked.seq_hashes or asked.block_hash or ()]


_UNKNOWN = re.compile(r"unknown field `(?P<name>.*)`", re.DOTALL)
_MISSING = re.compile(r"missing required field `(?P<name>\w+)`")
_PLACE = re.compile(r" - at `\$\.?(?P<name>[^`]*)`")


def _rejected(said: str) -> Rejected:
    for code, pattern, words in (
        ("unknown_field", _UNKNOWN, "there is no such field"),
        ("missing_field", _MISSING, "this field is missing"),
    ):
        if match := pattern.search(said):
            name = "".join(it if it.isprintable() else "?" for it in match["name"])[:FIELD_SHOWN]
            return Rejected(422, code, words, name)
    match = _PLACE.search(said)
    what = said[: match.start()] if match else said
    return Rejected(422, "wrong_value", what, match["name"] if match else None)


def _hash(it: int | str) -> int | bytes:
    if isinstance(it, int):
        if not -(1 << 63) <= it < 1 << 64:
            raise Rejected(422, "wrong_value", "a hash as a number has 64 bits", "seq_hashes")
        return it
    digits = it[2:] if it[:2] in ("0x", "0X") else it
    return bytes.fromhex(digits.zfill(len(digits) + len(digits) % 2))
