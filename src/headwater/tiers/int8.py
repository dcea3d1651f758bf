"""Lossy: bfloat16, float16 or float32 as int8 with a scale for each channel, about half or a quarter of the bytes.

Only namespaces that say `lossy = "int8"`, which makes their keys others than those of exact bytes, are changed, and of
those only KV groups whose `channels` are known. All others pass through as they are. Which it is follows from the
identity alone; so the stored length is always known beforehand.

    stored   for each shard: scales, then data, each filled up with zeros to 64 bytes; what lies between the shards'
             parts of a payload is not stored, and is zero when it comes back
    scales   float32 [layer][span][run][channel]
    data     int8    [layer][block][run][row][channel]

A block is `run`s (K and V, or heads) of one `row` a token, `channels` elements each. A scale covers the blocks of at
most 64 tokens (at least one block), a span: the scales then cost 6 % of the bytes, and one token of extreme values,
as the first of a prompt often is, coarsens no more than its own span. What arithmetic says of the error is in
`_kernels.codec`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from headwater._kernels import codec as kernels
from headwater.ports import Bytes
from headwater.tiers.elements import element_bytes, element_type
from headwater.tiers.header import Encoded
from headwater.tiers.scratch import Scratch
from headwater.types import Identity

SPAN_TOKENS = 64
_LINE = 64


@dataclass(frozen=True, slots=True)
class Part:
    """One shard's part of a chunk: where it is in the payload and in the stored bytes, and its shape."""

    start: int
    length: int
    stored_start: int
    element: str
    layers: int
    blocks: int
    span_blocks: int
    runs: int
    rows: int
    channels: int

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales."""
        return self.layers * -(-self.blocks // self.span_blocks) * self.runs * self.channels * 4

    @property
    def data_bytes(self) -> int:
        """Bytes of the data: one an element."""
        return self.layers * self.blocks * self.runs * self.rows * self.channels

    @property
    def data_start(self) -> int:
        """Where the data is in the stored bytes."""
        return self.stored_start + _lines(self.scale_bytes)

    @property
    def stored_end(self) -> int:
        """Where the next part is in the stored bytes."""
        return self.data_start + _lines(self.data_bytes)


class Int8:
    """See `Codec`. A chunk with an infinity or a NaN cannot be encoded."""

    name, fixed, in_place = "int8", True, False

    def __init__(self) -> None:
        self._scratch = Scratch()

    def stored_bytes(self, identity: Identity) -> int:
        """See `Codec`."""
        parts = list(_parts(identity))
        return parts[-1].stored_end if parts else identity.length_bytes

    def encode(self, identity: Identity, payload: Bytes, target: Bytes) -> Encoded | None:
        """See `Codec`."""
        stored_bytes = self.stored_bytes(identity)
        lossy = False
        for part in _parts(identity):
            lossy = True
            scales = self._scratch.take(part.scale_bytes)  # aligned, whatever the target is
            data = target[part.data_start : part.data_start + part.data_bytes].view(np.int8)
            if not _run(kernels.quantise, part, payload, scales, data):
                return None
            scales_end = part.stored_start + part.scale_bytes
            target[part.stored_start : scales_end] = scales
            target[scales_end : part.data_start] = 0
            target[part.data_start + part.data_bytes : part.stored_end] = 0
        if not lossy:
            target[:stored_bytes] = payload
        return Encoded(stored_bytes, self.name)

    def decode(self, identity: Identity, encoded: Encoded, stored: Bytes, target: Bytes) -> bool:
        """See `Codec`."""
        if encoded.codec != self.name or len(stored) != self.stored_bytes(identity):
            return False
        end = 0
        for part in _parts(identity):
            scales = self._scratch.take(part.scale_bytes)
            scales[:] = stored[part.stored_start : part.stored_start + part.scale_bytes]
            data = stored[part.data_start : part.data_start + part.data_bytes].view(np.int8)
            if not _run(kernels.dequantise, part, target, scales, data):
                return False
            target[end : part.start] = 0
            end = part.start + part.length
        if end:
            target[end:] = 0
        else:
            target[:] = stored
        return True

    def has_key(self, identity: Identity, key_id: str) -> bool:
        """See `Codec`."""
        return True


def _run(verb: kernels.Quantise, part: Part, payload: Bytes, scales: Bytes, data: kernels.Steps) -> bool:
    return verb(
        payload[part.start : part.start + part.length],
        scales.view(np.float32),
        data,
        element=part.element,
        layers=part.layers,
        blocks=part.blocks,
        span_blocks=part.span_blocks,
        runs=part.runs,
        rows=part.rows,
        channels=part.channels,
    )


def _parts(identity: Identity) -> Iterator[Part]:
    """The parts to quantise, in the order of the payload; none where all is stored as it is."""
    namespace, layout = identity.origin.namespace, identity.origin.layout
    group = layout.groups[identity.group]
    element = element_type(namespace.kv_dtype)
    row_bytes = group.channels * (element_bytes(namespace.kv_dtype) or 0)
    if namespace.lossy != Int8.name or element not in ("bfloat16", "float16", "float32") or not row_bytes:
        return
    rows, rest = divmod(group.block_bytes, row_bytes)
    if rest:
        return
    # Rows that are no multiple of the tokens are packed in a way that we do not know: one run of all of them.
    runs = rows // group.block_tokens if rows % group.block_tokens == 0 else 1
    blocks = layout.blocks_per_chunk(identity.group)
    span_blocks = min(blocks, max(1, SPAN_TOKENS // group.block_tokens))
    stored_start = 0
    for shard, layers in enumerate(group.shard_layers):
        part = Part(
            layout.part_offset(identity.group, shard),
            layout.part_bytes(identity.group, shard),
            stored_start,
            element,
            layers,
            blocks,
            span_blocks,
            runs,
            rows // runs,
            group.channels,
        )
        yield part
        stored_start = part.stored_end


def _lines(size_bytes: int) -> int:
    return -(-size_bytes // _LINE) * _LINE
