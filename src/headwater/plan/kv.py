"""How many bytes KV takes: per token, for a request on its GPUs, per chunk in the cache, and for a prefix on its way.

on GPUs   each group: layers * kept tokens * elements * width, times the copies that tensor parallelism makes:
          a rank holds at least one KV head, so tp / kv_heads copies where tp > kv_heads; a latent, which all
          heads share, is on every rank
in a chunk    a slot for each group: every rank's part, in whole pages (headwater's layout); a latent once; one
          state a chunk where the model has states, since a prefix can only be taken up at a chunk's end
on its way    of full attention all chunks, of a window those that reach into it, of a state the last
"""

from __future__ import annotations

from headwater.core.layout import needed_chunks
from headwater.errors import ConfigError
from headwater.plan.shapes import LayerGroup, LayerKind, ModelShape
from headwater.types import HitRule, KVGroup, KVLayout

WINDOWED = (LayerKind.WINDOW, LayerKind.CHUNKED)


def token_bytes(shape: ModelShape, width: float) -> float:
    """What one more token adds to a request within all windows, each head once."""
    return sum(it.layers * it.token_elements for it in shape.groups) * width


def growing_bytes(shape: ModelShape, width: float) -> float:
    """What one more token adds beyond all windows."""
    return sum(it.layers * it.token_elements for it in shape.groups if it.kind not in WINDOWED) * width


def state_bytes(shape: ModelShape, width: float) -> float:
    """What a request takes however long it is."""
    return sum(it.layers * it.state_elements for it in shape.groups) * width


def copies(group: LayerGroup, tp: int) -> int:
    """How often `tp` ranks hold each element of a group."""
    if group.kind is LayerKind.LATENT:
        return tp
    return 1 if group.kind is LayerKind.STATE else max(tp // group.kv_heads, 1)


def check_tp(shape: ModelShape, tp: int) -> None:
    """Raise ConfigError if `tp` ranks can neither share the KV heads evenly nor copy them evenly."""
    for it in shape.groups:
        even = it.kv_heads % tp == 0 or tp % it.kv_heads == 0
        if not even and it.kind not in (LayerKind.LATENT, LayerKind.STATE):
            raise ConfigError(
                f"--tp {tp}: {shape.name} has {it.kv_heads} KV heads, which {tp} ranks cannot share; "
                f"use a divisor or a multiple of {it.kv_heads}"
            )


def request_bytes(shape: ModelShape, width: float, tokens: int, tp: int = 1) -> int:
    """A request of `tokens` tokens on all its `tp` GPUs together."""
    total = 0.0
    for it in shape.groups:
        elements = it.kept_tokens(tokens) * it.token_elements + it.state_elements
        total += it.layers * elements * width * copies(it, tp)
    return round(total)


def layout(shape: ModelShape, width: float, chunk_tokens: int, block_tokens: int, tp: int) -> KVLayout:
    """How headwater lays a chunk out. Raises ConfigError if a chunk is not whole blocks."""
    if block_tokens <= 0 or chunk_tokens <= 0 or chunk_tokens % block_tokens:
        raise ConfigError(
            f"--chunk-tokens {chunk_tokens}: not whole blocks of {block_tokens} tokens; "
            f"use a multiple of {block_tokens}, or set --block-tokens"
        )
    check_tp(shape, tp)
    ranks = 1 if any(it.kind is LayerKind.LATENT for it in shape.groups) else tp
    groups = tuple(_group(it, width, chunk_tokens, block_tokens, ranks) for it in shape.groups)
    return KVLayout(chunk_tokens, groups)


def _group(it: LayerGroup, width: float, chunk_tokens: int, block_tokens: int, ranks: int) -> KVGroup:
    layers = (it.layers,) * ranks
    if it.kind is LayerKind.STATE:
        return KVGroup(chunk_tokens, max(round(it.state_elements * width / ranks), 1), layers, HitRule.LAST)
    block_bytes = round(block_tokens * it.token_elements * width * copies(it, ranks) / ranks)
    rule = HitRule.WINDOW if it.kind in WINDOWED else HitRule.ALL
    return KVGroup(block_tokens, block_bytes, layers, rule, it.window_tokens)


def chunk_bytes(stored: KVLayout) -> int:
    """All slots of one chunk."""
    return sum(stored.slot_bytes(group) for group in range(len(stored.groups)))


def prefix_bytes(stored: KVLayout, tokens: int) -> int:
    """What has to be moved so that a prefix of `tokens` tokens can be used: whole chunks, of each group what its hit
    rule asks for."""
    chunks = tokens // stored.chunk_tokens
    return sum(
        len(needed_chunks(stored, group, chunks)) * stored.slot_bytes(group) for group in range(len(stored.groups))
    )
