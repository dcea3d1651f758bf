from headwater.ports import Addresses, BlockIds

ISAS: tuple[str, ...]

def copyv(targets: Addresses, sources: Addresses, lengths: Addresses, *, isa: str | None = None) -> None: ...
def gather(
    bases: Addresses,
    blocks: BlockIds,
    places: Addresses,
    *,
    block_bytes: int,
    stride_bytes: int,
    layer_stride_bytes: int,
    isa: str | None = None,
) -> None: ...
def scatter(
    bases: Addresses,
    blocks: BlockIds,
    places: Addresses,
    *,
    block_bytes: int,
    stride_bytes: int,
    layer_stride_bytes: int,
    isa: str | None = None,
) -> None: ...
def touch(address: int, length: int, *, populate: bool = True) -> None: ...
