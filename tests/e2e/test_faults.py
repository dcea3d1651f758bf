"""One real vLLM server whose node is killed, paused and restarted under it: answers stay the same, and in time."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from headwater.demo.beginning import MODEL
from headwater.demo.command import START_S
from headwater.demo.processes import Child, Children, Served, kv_transfer_config, start_node, start_vllm
from headwater.demo.requests import Answer, ask, read_metrics
from headwater.errors import UnavailableError
from headwater.node.client import fetch_status

PAUSE = threading.Event()
pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

HEAL_S = 10.0
CALL_S = 1.0


@dataclass
class Setting:
    """A server and the node under it, which tests replace."""

    children: Children
    address: str
    directory: Path
    server: Served
    node: Child

    def restart_node(self) -> None:
        self.node = start_node(self.children, self.address, "512MiB", self.directory / "node.log")

    def signal_node(self, number: int) -> None:
        os.killpg(self.node.group, number)

    def held_bytes(self) -> int:
        spaces = fetch_status(self.address)["namespaces"]
        assert isinstance(spaces, list)
        return sum(space["held_bytes"] for space in spaces)


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory, one_process: None) -> Iterator[Setting]:
    directory = tmp_path_factory.mktemp("faults")
    address = f"unix:{directory}/node.sock"
    with Children() as children:
        node = start_node(children, address, "512MiB", directory / "node.log")
        server = start_vllm(children, "A", MODEL.resolve(), None, kv_transfer_config(address), directory)
        server.child.wait_until(server.healthy, START_S, lambda: None)
        yield Setting(children, address, directory, server, node)


def chat(topic: str) -> list[dict[str, str]]:
    """About 500 tokens that no other test asks about, with a question."""
    text = " ".join(f"{topic} number {n} is {n * 31 % 97} years old." for n in range(40))
    return [{"role": "system", "content": text}, {"role": "user", "content": f"How old is {topic} 7?"}]


def wait_until(condition: Callable[[], bool], within_s: float) -> float:
    """The seconds until the condition held; fails after `within_s`."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < within_s, f"not within {within_s} s"
        PAUSE.wait(0.05)
    return time.monotonic() - started


def check_same(server: Served, topic: str, **limits: float) -> Answer:
    """Ask with and without cache; the answers must be equal, and the first token not later than allowed."""
    plain = ask(server, chat(topic), without_cache=True)
    cached = ask(server, chat(topic))
    assert cached.token_ids == plain.token_ids
    allowed = plain.ttft_s * 1.5 + limits.get("extra_s", 0.0) + 1.0
    assert cached.ttft_s < allowed, f"{cached.ttft_s:.2f} s, {plain.ttft_s:.2f} s without a cache"
    return cached


def test_the_node_is_killed_and_comes_back(setting: Setting) -> None:
    check_same(setting.server, "oak")
    wait_until(lambda: setting.held_bytes() > 0, HEAL_S)
    setting.signal_node(signal.SIGKILL)
    check_same(setting.server, "elm", extra_s=CALL_S)
    check_same(setting.server, "ash")
    setting.restart_node()
    assert setting.held_bytes() == 0

    def connected() -> bool:
        return bool(fetch_status(setting.address)["namespaces"])

    wait_until(connected, HEAL_S)
    check_same(setting.server, "yew")
    wait_until(lambda: setting.held_bytes() > 0, HEAL_S)


def test_the_node_is_paused(setting: Setting) -> None:
    setting.signal_node(signal.SIGSTOP)
    try:
        with pytest.raises(UnavailableError):
            fetch_status(setting.address, timeout_s=0.3)
        check_same(setting.server, "fir", extra_s=2 * CALL_S)
        check_same(setting.server, "bay")
    finally:
        setting.signal_node(signal.SIGCONT)
    before = setting.held_bytes()

    def saves_again() -> bool:
        ask(setting.server, chat(f"lime{time.monotonic_ns()}"))
        return setting.held_bytes() > before

    wait_until(saves_again, HEAL_S + 30.0)


def test_the_engines_own_metrics_tell(setting: Setting) -> None:
    sums = read_metrics(setting.server)
    assert sums["vllm:headwater_saved_bytes_total"] > 0
    assert {"vllm:headwater_loaded_bytes_total", "vllm:headwater_failed_loads_total"} <= sums.keys()
