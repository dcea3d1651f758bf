"""The processes of the cluster's demo: a directory, three nodes in places of their own, engines on two of them."""

from __future__ import annotations

import http.client
import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from headwater.client import Client
from headwater.config import child_environment
from headwater.core.hashing import chunk_keys
from headwater.demo.loopback import Loopback
from headwater.demo.namespaces import Lab
from headwater.demo.processes import Child, Children, Served, free_port, kv_transfer_config, start_vllm
from headwater.demo.requests import Chat
from headwater.demo.valkey import answers, valkey_command
from headwater.directory.open import open_directory
from headwater.errors import HeadwaterError, ResourceError, UnavailableError
from headwater.node.client import ask_operator, fetch_status
from headwater.node.messages import Drain, Evict, Namespaces
from headwater.types import ChunkKey, KVLayout, Namespace, chunk_name, pack_keys

NODES = ("A", "B", "C")
CLUSTER = "demo"
DIRECTORY_PORT = 6379
START_S = 300.0
READY_S = 20.0
POLL_S = 0.02
CALL_S = 1.0
PULL_S = 5.0
DRAIN_S = 30.0

Network = Lab | Loopback


def open_network(*, loopback: bool) -> Network:
    """Namespaces where they can be had and are wanted, else loopback addresses."""
    if not loopback:
        with suppress(ResourceError):
            return Lab(NODES)
    return Loopback(NODES)


class Known:
    """A namespace that engines have registered, for programs that are none: its record, its layout, its keys."""

    def __init__(self, node: str) -> None:
        """Ask a node for the one that it knows; raises UnavailableError if there is none."""
        told = msgspec.convert(ask_operator(node, Namespaces()), dict[str, list[dict[str, object]]])["namespaces"]
        if not told:
            raise UnavailableError(f"no engine has registered at {node}")
        self.namespace = msgspec.convert(told[0]["namespace"], Namespace)
        self.layout = msgspec.convert(told[0]["layout"], KVLayout)
        self.root = self.namespace.root()

    def keys(self, tokens: Sequence[int]) -> list[ChunkKey]:
        """The keys of a prompt's whole chunks."""
        return chunk_keys(self.root, tokens, self.layout.chunk_tokens)


class Stage:
    """All that runs. Methods block until what they do is done."""

    def __init__(self, children: Children, network: Network, model: Path, memory: str, scratch: Path, logs: Path):
        self.network = network
        self.servers: dict[str, Served] = {}
        self._children, self._model, self._memory = children, model, memory
        self._scratch, self._logs = scratch, logs
        self._nodes: dict[str, Child] = {}
        self._lives = 0
        self._directory: Child | None = None
        self._port = DIRECTORY_PORT if isinstance(network, Lab) else free_port()
        self._token = scratch / "token"
        self._token.touch(mode=0o600)
        self._token.write_text(secrets.token_hex(32) + "\n")

    @property
    def url(self) -> str:
        """The directory's."""
        return f"redis://{self.network.hub_address}:{self._port}"

    def socket(self, name: str) -> str:
        """Where a node's engines and clients connect."""
        return f"unix:{self._scratch}/{name}.sock"

    # ---- what runs ------------------------------------------------------------------------------------

    def start_directory(self) -> float:
        """A new, empty one, at the address of the one before; returns when it answers, and when that was."""
        self._lives += 1
        folder = self._scratch / f"valkey-{self._lives}"
        folder.mkdir(mode=0o700)
        command = [*valkey_command(self._port, folder, address=self.network.hub_address), "--protected-mode", "no"]
        with self.network.at_hub():
            log = self._logs / f"valkey-{self._lives}.log"
            self._directory = self._children.start("Valkey", command, child_environment({}), log)
            # A thread that waits elsewhere would not see it.
            self._directory.wait_until(lambda: answers(self._port, self.network.hub_address), READY_S, lambda: None)
        return time.monotonic()

    def kill_directory(self) -> None:
        """Nobody answers at its address any more, and what it knew is lost."""
        assert self._directory is not None
        self._kill(self._directory)

    def start_node(self, name: str) -> None:
        """A node that is a member."""
        self._lives += 1
        command = [sys.executable, "-m", "headwater", "node"]
        for setting, value in self.node_settings(name).items():
            command += [f"--{setting.replace('_', '-')}", value]
        with self.network.at(name):
            log = self._logs / f"node-{name}-{self._lives}.log"
            node = self._children.start(f"headwater node {name}", command, child_environment({}), log)
        self._nodes[name] = node
        node.wait_until(lambda: self._is_member(name), READY_S, lambda: None)

    def kill_node(self, name: str) -> None:
        """As a power cut would."""
        self._kill(self._nodes.pop(name))

    def drain_node(self, name: str) -> bool:
        """Have the others read what only this node has, then end it; whether they did."""
        node = self.socket(name)
        ask_operator(node, Drain())
        took_s = self.wait_until(lambda: _is_done(ask_operator(node, Drain(begins=False))), DRAIN_S)
        self._children.end(self._nodes.pop(name))
        return took_s <= DRAIN_S

    def start_engines(self, names: Sequence[str]) -> None:
        """vLLM instances, each at its host's node."""
        cores: list[int | None] = [*sorted(os.sched_getaffinity(0))[: len(names)]]
        cores += [None] * (len(names) - len(cores))
        for name, core in zip(names, cores, strict=True):
            transfer = kv_transfer_config(self.socket(name))
            self.servers[name] = start_vllm(
                self._children, name, self._model, core, transfer, self._logs, resettable=True
            )
        for it in self.servers.values():
            it.child.wait_until(it.healthy, START_S, lambda: None)

    def node_settings(self, name: str) -> dict[str, str]:
        """How a node is started: its settings, as flags are named."""
        return {
            "name": name,
            "cluster": CLUSTER,
            "directory": self.url,
            "token_file": str(self._token),
            "socket": self.socket(name),
            "host_memory": self._memory,
            "metrics": "off",
            **self.network.settings(name),
        }

    # ---- what is done to it ---------------------------------------------------------------------------

    def known(self, name: str) -> Known:
        """The namespace of the engine on a host."""
        return Known(self.socket(name))

    def keys(self, name: str, chat: Chat) -> list[ChunkKey]:
        """The keys under which a prompt's chunks are kept."""
        server = self.servers[name]
        body = {"model": "model", "messages": list(chat)}
        told = msgspec.json.decode(_post(server, "/tokenize", body), type=dict[str, object])
        return self.known(name).keys(msgspec.convert(told["tokens"], list[int]))

    def held(self, name: str, keys: Sequence[ChunkKey]) -> int:
        """How many leading chunks a node has in its memory."""
        known = self.known("A" if name == "C" else name)
        with Client(self.socket(name), known.namespace, known.layout) as client:
            return client.match(keys)

    def pull(self, name: str, keys: Sequence[ChunkKey], wait_s: float = PULL_S) -> int:
        """Have a node bring a prompt to its memory, from wherever it is; how many chunks it has then."""
        known = self.known("A")
        with Client(self.socket(name), known.namespace, known.layout) as client, client.load(keys, wait_s=wait_s) as it:
            return it.chunks

    def evict(self, name: str, keys: Sequence[ChunkKey]) -> None:
        """Have a node forget a prompt, and its engine, if it has one."""
        if name in self.servers:
            _post(self.servers[name], "/reset_prefix_cache", {})
        known = self.known("A" if name == "C" else name)
        ask_operator(self.socket(name), Evict(known.root, pack_keys(keys), below=False))

    def listed(self, keys: Sequence[ChunkKey]) -> int:
        """How many of these chunks the directory says that somebody holds; 0 while it does not answer."""
        with self.network.at_hub():
            directory = open_directory(self.url, CLUSTER)
            try:
                found = directory.locate([chunk_name(0, key) for key in keys], time.monotonic() + CALL_S)
            except UnavailableError:
                found = []
            finally:
                directory.close()
        return sum(map(bool, found))

    def wait_until(self, fact: Callable[[], bool], within_s: float) -> float:
        """When the fact held, in seconds from now; infinity if it did not in time."""
        began_s = time.monotonic()
        while not fact():
            if time.monotonic() - began_s > within_s:
                return float("inf")
            time.sleep(POLL_S)
        return time.monotonic() - began_s

    # ---- inside ---------------------------------------------------------------------------------------

    def _is_member(self, name: str) -> bool:
        try:
            state = fetch_status(self.socket(name))
        except HeadwaterError:
            return False
        cluster = state.get("cluster")
        return isinstance(cluster, dict) and bool(cluster.get("number"))

    def _kill(self, child: Child) -> None:
        os.killpg(child.group, signal.SIGKILL)
        self._children.end(child)


def _is_done(state: object) -> bool:
    return isinstance(state, dict) and state.get("done") is True


def _post(server: Served, path: str, body: Mapping[str, object]) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30.0)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
        if answer.status != http.client.OK:
            raise UnavailableError(f"vLLM {server.name} answered {path} by {answer.status}: {text[:500]!r}")
        return text
    except OSError as error:
        raise UnavailableError(f"vLLM {server.name} does not answer: {error}") from error
    finally:
        connection.close()
