"""Keep objects in a node's memory with the Store alone: no engine, no KV layout.

Run it against a node of your own (`headwater node --host-memory 1GiB` in another terminal):

    python examples/store.py unix:/run/user/1000/headwater/node.sock

or without an argument: then it serves a small node from a thread of its own first.
"""

import sys
import tempfile

import numpy as np

from headwater.config import NodeConfig
from headwater.node.driver import Node
from headwater.node.server import EmbeddedServer
from headwater.store import Outcome, Store


def use(node: str) -> None:
    """Every verb once."""
    weights = np.random.default_rng(1).random(1 << 20, dtype=np.float32)
    with Store(node) as store, Store(node) as other:
        results = store.put({"greeting": b"hello", "empty": b"", "weights": weights}, ttl_s=600.0)
        print("put:", [it.outcome.value for it in results])
        print("get by another client:", other.get(["greeting", "empty", "nothing"]))

        target = np.empty_like(weights)
        (got,) = other.get_into(["weights"], [target])
        print(f"get_into: {got.outcome.value}, {got.length_bytes} bytes, equal: {np.array_equal(target, weights)}")
        with other.view(["weights"]) as (view,):
            if view is not None:
                print(f"view: the sum is {np.frombuffer(view.data, np.float32).sum():.0f}, and no byte was copied")

        (again,) = other.put({"greeting": b"other bytes"})
        assert again.outcome is Outcome.EXISTS
        print(f"put of other bytes: {again.outcome.value}; {again.reason}")
        print("exists:", other.exists(["greeting", "nothing"]), "size:", other.size(["weights", "nothing"]))
        print("pin:", store.pin(["weights"], ttl_s=60.0), "unpin:", store.unpin(["weights"]))
        print("remove:", store.remove(["greeting", "empty", "weights", "nothing"]))


def main() -> None:
    """Use the node named on the command line, or one of our own."""
    if len(sys.argv) > 1:
        use(sys.argv[1])
        return
    with tempfile.TemporaryDirectory() as directory:
        address = f"unix:{directory}/node.sock"
        server = EmbeddedServer(Node(NodeConfig(socket=address, host_memory=64 << 20)), address)
        try:
            use(address)
        finally:
            server.close()


if __name__ == "__main__":
    main()
