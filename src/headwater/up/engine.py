"""How one vLLM is started: its command line and environment. What the user says wins over what we would."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from headwater.errors import ConfigError
from headwater.fleetfile.model import InstanceSpec
from headwater.fleetfile.words import flag_name
from headwater.up.machine import Machine
from headwater.up.plug_in import transfer_config

EVENTS_KEPT = 100_000
"""Batches that an engine keeps to say them again, and the most that wait to be sent."""
KV_SPACE_BYTES = (1 << 30, 16 << 30)
"""The least and the most that an engine on the CPU is given for its KV."""
GPUS = "CUDA_VISIBLE_DEVICES"
CORES = "VLLM_CPU_OMP_THREADS_BIND"
PARALLEL = {
    "--tensor-parallel-size": 1,
    "-tp": 1,
    "--pipeline-parallel-size": 1,
    "-pp": 1,
}
"""Flags that multiply the devices of a rank."""


def events_config(events: str, replay: str | None) -> dict[str, object]:
    """What makes vLLM publish what it holds, at a `*` or on loopback.

    vLLM binds its publisher only where the endpoint has a `*` or a `::` in it, and connects to all else: so loopback is
    written as an IPv6 address, which ZeroMQ takes for the IPv4 one that it is. A `*` would tell prompts to the network.
    """
    found: dict[str, object] = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": events.replace("//127.0.0.1:", "//[::ffff:127.0.0.1]:"),
        "buffer_steps": EVENTS_KEPT,
        "hwm": EVENTS_KEPT,
        "max_queue_size": EVENTS_KEPT,
    }
    return found if replay is None else found | {"replay_endpoint": replay}


def engine_command(it: InstanceSpec, socket: str | None, machine: Machine, host: str = "127.0.0.1") -> list[str]:
    """The words after `vllm`. `socket` is that of the instance's node; None: no plug-in."""
    ours: list[tuple[str, ...]] = [("--enable-prompt-tokens-details",), ("--disable-uvicorn-access-log",)]
    if it.ranks > 1:
        ours.append(("--data-parallel-size", str(it.ranks)))
    if it.block_tokens is not None:
        ours.append(("--block-size", str(it.block_tokens)))
    if not machine.gpus:
        ours.append(("--dtype", "bfloat16" if machine.bfloat16 else "float32"))
    if socket is not None:
        ours.append(("--kv-transfer-config", _json(transfer_config(socket, it.name))))
    if it.events is not None:
        ours.append(("--kv-events-config", _json(events_config(it.events, it.replay))))
    theirs = {flag_name(flag) for flag in it.flags}
    kept = [words for words in ours if not theirs & {words[0], words[0].replace("--", "--no-", 1)}]
    fixed = ["serve", it.model, "--host", host, "--port", str(it.port), "--served-model-name", it.served_name]
    return [*fixed, *(word for words in kept for word in words), *it.flags]


def _json(value: Mapping[str, object]) -> str:
    return json.dumps(value, separators=(",", ":"))


def devices(it: InstanceSpec) -> int:
    """How many GPUs, or workers on the CPU, an instance has."""
    count = it.ranks
    words = [part for flag in it.flags for part in (flag.split("=", 1) if flag.startswith("-") else [flag])]
    for word, following in zip(words, [*words, ""][1:], strict=True):
        if flag_name(word) in PARALLEL and following.isdigit():
            count *= max(int(following), 1)
    return count


def share_out(instances: Sequence[InstanceSpec], machine: Machine) -> dict[str, tuple[str, ...]]:
    """Which GPUs, or cores, each instance gets: those that say it themselves, none; the others, in turn. GPUs are never
    shared unless the file says so; cores are, where there are fewer than instances. Raises ConfigError."""
    name = GPUS if machine.gpus else CORES
    wanting = [it for it in instances if name not in it.environment]
    shares: dict[str, tuple[str, ...]] = {it.name: () for it in instances}
    if machine.gpus:
        needed = sum(map(devices, wanting))
        if needed > len(machine.gpus):
            raise ConfigError(
                f"instances: {needed} GPUs are needed and there are {len(machine.gpus)}; start fewer, or say by "
                f"{GPUS} in `environment` which of them share one"
            )
        at = 0
        for it in wanting:
            shares[it.name] = machine.gpus[at : at + devices(it)]
            at += devices(it)
        return shares
    cores, count = machine.cores, len(wanting)
    for at, it in enumerate(wanting if cores else ()):
        begin, end = at * len(cores) // count, (at + 1) * len(cores) // count
        mine = cores[begin:end] or (cores[at % len(cores)],)
        shares[it.name] = tuple(map(str, mine))
    return shares


def engine_environment(it: InstanceSpec, machine: Machine, share: Sequence[str], instances: int = 1) -> dict[str, str]:
    """What is different in an engine's environment."""
    ours = {"VLLM_NO_USAGE_STATS": "1"}
    if share and machine.gpus:
        ours[GPUS] = ",".join(share)
    elif share:
        ours[CORES] = _bound(share, devices(it))
    if not machine.gpus:
        least, most = KV_SPACE_BYTES
        ours["VLLM_CPU_KVCACHE_SPACE"] = str(min(max(machine.memory_bytes // 8 // instances, least), most) >> 30)
    return ours | dict(it.environment)


def _bound(cores: Sequence[str], workers: int) -> str:
    """Cores for each worker, as vLLM wants them: `0,1|2,3`."""
    size = max(len(cores) // workers, 1)
    parts = [cores[(at * size) % len(cores) :][:size] for at in range(workers)]
    return "|".join(",".join(part) for part in parts)
