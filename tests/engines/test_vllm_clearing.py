"""A reset of the prefix cache with lower tiers: it says True only once nothing old can be served from any of them."""

from pathlib import Path
from typing import Any

from headwater.node.client import fetch_status
from tests.engines.served import DENSE, MODES, WAIT_S, Served, eventually
from tests.engines.workload import words
from tests.servers import redis_server, valkey_program

PROMPT = words(150, 5)
CHUNKS = 4


def sunk(served: Served) -> None:
    """All that was saved is in both lower tiers."""

    def is_below() -> bool:
        tiers: Any = fetch_status(served.address, WAIT_S)["tiers"]
        return all(it["written_chunks"] == CHUNKS for it in tiers[1:])

    eventually(is_below)


@MODES
def test_a_reset_waits_for_every_tier(serve, tmp_path: Path, mode) -> None:
    folder = tmp_path / "valkey"
    folder.mkdir()
    with redis_server(valkey_program(), folder, "--appendonly", "yes", "--appendfsync", "always") as valkey:
        served = serve(disk=f"{tmp_path}/kv:64MiB", disk_reserve=0, remotes=(valkey.url(),))
        first = served.engine(DENSE, mode)
        first.add("a", PROMPT, max_tokens=2)
        first.run()
        sunk(served)
        valkey.kill()
        assert first.connector.reset_cache() is False, "the remote has not deleted it"
        second = served.engine(DENSE, mode)
        second.add("b", PROMPT, max_tokens=2)
        second.run()
        assert second.loaded_tokens("b") == 0, "neither from the disk nor from memory"
        valkey.start()
        eventually(lambda: first.connector.reset_cache())
        second.add("c", PROMPT, max_tokens=2)
        second.forget()
        second.run()
        assert second.loaded_tokens("c") == 0
