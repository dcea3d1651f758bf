"""Blocks through NIXL over UCX, two processes, one turn at a time; run by NIXL's Python.

    PYTHONPATH=src .cache/peers/nixl/bin/python benchmarks/nixl_transfer.py cma|tcp POOL_BYTES

See `headwater.bench.blocks` for what it is asked and answers. Each call makes, posts and awaits one transfer whose
descriptors are new, as for blocks of a paged cache.
"""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Sequence

from nixl_cu12._api import nixl_agent, nixl_agent_config

from headwater.bench.blocks import Pool, main

TRANSPORTS = {"cma": "cma,posix,sysv,self,tcp", "tcp": "tcp,self"}
"""What UCX may choose from; it cannot begin without tcp."""


def start(name: str, pool: Pool) -> nixl_agent:
    """An agent with the pool registered."""
    agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    if agent.register_memory([(pool.address, pool.size, 0, "")], "DRAM") is None:
        raise SystemExit("NIXL does not register memory")
    return agent


serving: list[nixl_agent] = []


def serve(pool: Pool) -> str:
    """The peer: its metadata, and where its pool lies."""
    serving.append(start("peer", pool))
    return f"{base64.b64encode(serving[0].get_agent_metadata()).decode()} {pool.address}"


class Nixl:
    """An agent that moves to and from one other."""

    def __init__(self, pool: Pool, words: str) -> None:
        self._agent, self._base = start("bench", pool), pool.address
        metadata, address = words.split()
        self._remote = int(address)
        self._peer = self._agent.add_remote_agent(base64.b64decode(metadata))

    def move(self, verb: str, places: Sequence[int], offsets: Sequence[int], block_bytes: int) -> None:
        """See `headwater.bench.blocks.Mover`."""
        agent = self._agent
        here = agent.get_xfer_descs([(self._base + it, block_bytes, 0) for it in places], "DRAM")
        there = agent.get_xfer_descs([(self._remote + it, block_bytes, 0) for it in offsets], "DRAM")
        handle = agent.initialize_xfer(verb.upper(), here, there, self._peer)
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            raise SystemExit(f"NIXL's {verb} ended as {state}")
        agent.release_xfer_handle(handle)


if __name__ == "__main__":
    os.environ["UCX_TLS"] = TRANSPORTS[sys.argv[1]]
    main(serve, Nixl, int(sys.argv[2]))
