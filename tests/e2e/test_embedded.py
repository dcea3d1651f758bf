"""One real vLLM with a node inside it: the engine is restarted, its memory is gone, and its disk has the prefix."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from headwater.config import runtime_dir
from headwater.demo.beginning import MODEL
from headwater.demo.command import START_S
from headwater.demo.processes import Children, Served, start_vllm
from headwater.demo.requests import ask, read_metrics
from headwater.demo.story import wait_for_rest
from headwater.demo.valkey import start_valkey
from tests.node.conftest import eventually
from tests.node.tiered import Still, tier

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

CHUNK = 128


def chat(topic: str) -> list[dict[str, str]]:
    """About 400 tokens, with a question."""
    text = " ".join(f"{topic} number {n} is {n * 31 % 97} years old." for n in range(30))
    return [{"role": "system", "content": text}, {"role": "user", "content": f"How old is {topic} 7?"}]


def node_of_its_own() -> str:
    """The address of the node inside the engine: the only socket there is."""
    found = [it for it in runtime_dir().iterdir() if it.name.endswith(".sock")]
    assert len(found) == 1, found
    return f"unix:{found[0]}"


def test_a_restarted_engine_finds_its_prefix_on_its_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    (tmp_path / "run").mkdir(mode=0o700)
    with Children() as children:
        settings = {
            "host_memory": "256MiB",
            "disk": f"{tmp_path}/disk:256MiB",
            "remotes": [start_valkey(children, tmp_path / "valkey", tmp_path / "valkey.log")],
            "chunk_tokens": CHUNK,
        }
        transfer = {
            "kv_connector": "HeadwaterConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": settings,
        }

        def start(life: str) -> Served:
            logs = tmp_path / life
            logs.mkdir()
            server = start_vllm(children, "A", MODEL.resolve(), None, transfer, logs)
            server.child.wait_until(server.healthy, START_S, lambda: None)
            return server

        server = start("first")
        plain = ask(server, chat("oak"), without_cache=True)
        assert ask(server, chat("oak")).token_ids == plain.token_ids
        eventually(lambda: read_metrics(server)["vllm:headwater_saved_bytes_total"] > 0, 20.0)
        wait_for_rest(node_of_its_own())
        for number in (1, 2):
            written = tier(node_of_its_own(), number)["written_chunks"]
            assert written == plain.prompt_tokens // CHUNK, "disk and Valkey have the prompt"
        eventually(Still(tmp_path / "disk"))
        # vLLM ends its engine process at any point, so this node has no time to say goodbye.
        children.end(server.child)

        server = start("second")
        assert tier(node_of_its_own())["used_bytes"] > 0, "the disk is as the first engine left it"
        ask(server, chat("elm"), without_cache=True)
        began_s = time.monotonic()
        again = ask(server, chat("oak"))
        print(f"{again.ttft_s:.2f} s of {time.monotonic() - began_s:.2f} s, {plain.ttft_s:.2f} s without a cache")
        assert again.token_ids == plain.token_ids
        assert again.cached_tokens == plain.prompt_tokens // CHUNK * CHUNK
        sums = read_metrics(server)
        assert sums["vllm:headwater_disk_tokens_total"] == again.cached_tokens
        assert sums["vllm:headwater_remote_tokens_total"] == sums["vllm:headwater_host_tokens_total"] == 0
