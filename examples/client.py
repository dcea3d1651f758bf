"""Use headwater's cache from plain Python: two clients of one node share what the first one saved.

Run it against a node of your own (`headwater node --host-memory 1GiB` in another terminal):

    python examples/client.py unix:/run/user/1000/headwater/node.sock

or without an argument: then it serves a small node from a thread of its own first.
"""

import sys
import tempfile

import numpy as np

from headwater import Client, KVGroup, KVLayout, Namespace
from headwater.config import NodeConfig
from headwater.node.driver import Node
from headwater.node.server import EmbeddedServer

# 4 layers, blocks of 16 tokens with 2 KiB a layer, cached in chunks of 64 tokens.
LAYOUT = KVLayout(chunk_tokens=64, groups=(KVGroup(block_tokens=16, block_bytes=2048, shard_layers=(4,)),))
NAMESPACE = Namespace(model="example-1", kv_dtype="bfloat16", layout="example", groups=LAYOUT.fingerprint())


def compute_kv(tokens: list[int]) -> np.ndarray:
    """Stands for a prefill: the KV bytes of one chunk."""
    return np.random.default_rng(sum(tokens)).integers(0, 256, LAYOUT.part_bytes(0, 0), dtype=np.uint8)


def share(node: str) -> None:
    """Save with one client, load with another, and check that the bytes are the same."""
    prompt = list(range(1000, 1200))  # 200 tokens: three whole chunks and a tail
    with Client(node, NAMESPACE, LAYOUT) as first, Client(node, NAMESPACE, LAYOUT) as second:
        keys = first.keys(prompt)
        print(f"{len(prompt)} tokens are {len(keys)} chunks; held before: {first.match(keys)}")
        with first.save(keys) as saving:
            for position in saving.positions:
                saving.part(position)[:] = compute_kv(prompt[position * 64 : (position + 1) * 64])
        longer = second.keys([*prompt, *range(500)])
        with second.load(longer) as held:
            for position in range(held.chunks):
                expected = compute_kv(prompt[position * 64 : (position + 1) * 64])
                assert np.array_equal(held.part(position), expected), f"chunk {position} differs"
            print(f"the second client found {held.chunks} of its {len(longer)} chunks, with equal bytes")


def main() -> None:
    """Share through the node named on the command line, or through one of our own."""
    if len(sys.argv) > 1:
        share(sys.argv[1])
        return
    with tempfile.TemporaryDirectory() as directory:
        address = f"unix:{directory}/node.sock"
        server = EmbeddedServer(Node(NodeConfig(socket=address, host_memory=64 << 20)), address)
        try:
            share(address)
        finally:
            server.close()


if __name__ == "__main__":
    main()
