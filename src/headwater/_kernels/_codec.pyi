from headwater._kernels.codec import Scales, Steps
from headwater.ports import Bytes

ISAS: tuple[str, ...]

def shuffle(source: Bytes, target: Bytes, *, element_bytes: int, isa: str | None = None) -> None: ...
def unshuffle(source: Bytes, target: Bytes, *, element_bytes: int, isa: str | None = None) -> None: ...
def quantise(
    source: Bytes,
    scales: Scales,
    data: Steps,
    *,
    element: str,
    layers: int,
    blocks: int,
    span_blocks: int,
    runs: int,
    rows: int,
    channels: int,
    isa: str | None = None,
) -> bool: ...
def dequantise(
    source: Bytes,
    scales: Scales,
    data: Steps,
    *,
    element: str,
    layers: int,
    blocks: int,
    span_blocks: int,
    runs: int,
    rows: int,
    channels: int,
    isa: str | None = None,
) -> bool: ...
