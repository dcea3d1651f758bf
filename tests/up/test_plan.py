"""What would be started: commands, environments, ports, order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headwater.errors import ConfigError
from headwater.fleetfile.words import flag_name
from headwater.up.machine import Machine, Programs, find_programs, look
from headwater.up.plan import Kind, Plan, Process, make_plan
from tests.fleetfile.files import SECRET, WHOLE, read

FOLDER = Path("/run/hw")
CPU = Machine(cores=(0, 1, 2, 3), memory_bytes=64 << 30)
GPU = Machine(gpus=("0", "1", "2", "3"), cores=(0, 1))
PROGRAMS = Programs("python3", "vllm", "valkey-server")


def planned(folder: Path, text: str, machine: Machine = CPU) -> dict[str, Process]:
    return {it.name: it for it in plan_of(folder, text, machine).processes}


def plan_of(folder: Path, text: str, machine: Machine = CPU) -> Plan:
    return make_plan(read(folder, text), FOLDER, machine, PROGRAMS)


def value_of(process: Process, flag: str) -> str:
    """What follows a flag, which is there once."""
    assert [flag_name(it) for it in process.command].count(flag) == 1, process.command
    return process.command[process.command.index(flag) + 1]


def json_of(process: Process, flag: str) -> Any:
    return json.loads(value_of(process, flag))


def test_who_is_started_and_after_whom(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, WHOLE)
    assert [(it.name, it.kind) for it in plan.processes] == [
        ("directory", Kind.DIRECTORY),
        ("near", Kind.NODE),
        ("chat-0", Kind.ENGINE),
        ("chat-1", Kind.ENGINE),
        ("chat-2", Kind.ENGINE),
        ("long", Kind.ENGINE),
        ("alone", Kind.ENGINE),
        ("conductor", Kind.CONDUCTOR),
    ]
    after = {it.name: it.after for it in plan.processes}
    assert after["near"] == ("directory",) and after["chat-0"] == ("near",)
    assert after["long"] == () and after["alone"] == ()  # its node is somebody else's; it has none
    assert after["conductor"] == tuple(it.name for it in plan.processes[:-1])
    assert plan.url == "http://127.0.0.1:8000/v1"


def test_names_known_before_are_all_that_anybody_waits_for(tmp_path: Path) -> None:
    seen: set[str] = set()
    for it in plan_of(tmp_path, WHOLE).processes:
        assert seen.issuperset(it.after)
        seen.add(it.name)


def test_no_port_is_used_twice(tmp_path: Path) -> None:
    ports = [port for it in plan_of(tmp_path, WHOLE).processes for port in it.ports]
    assert len(ports) == len(set(ports)) and {7480, 8000, 8001, 8100, 9000, 15606, 15607, 15608, 15609} <= set(ports)


def test_an_engine_is_plugged_in_and_publishes_on_loopback(tmp_path: Path) -> None:
    chat = planned(tmp_path, WHOLE)["chat-1"]
    assert chat.command[:3] == ("vllm", "serve", "/models/smol")
    assert (value_of(chat, "--host"), value_of(chat, "--port")) == ("127.0.0.1", "8101")
    assert value_of(chat, "--served-model-name") == "smol" and "--enable-prompt-tokens-details" in chat.command
    transfer = json_of(chat, "--kv-transfer-config")
    assert transfer["kv_connector"] == "HeadwaterConnector" and transfer["kv_load_failure_policy"] == "recompute"
    assert transfer["engine_id"] == "chat-1"
    assert transfer["kv_connector_extra_config"] == {"node": "unix:/run/hw/near.sock"}
    events = json_of(chat, "--kv-events-config")
    # vLLM binds only what has a `*` or a `::` in it.
    assert (events["endpoint"], events["replay_endpoint"]) == (
        "tcp://[::ffff:127.0.0.1]:15602",
        "tcp://127.0.0.1:15603",
    )
    assert chat.probe.address == "http://127.0.0.1:8101/health"


def test_without_node_or_events_there_is_no_plug_in_and_no_publisher(tmp_path: Path) -> None:
    alone = planned(tmp_path, WHOLE)["alone"]
    assert not {"--kv-transfer-config", "--kv-events-config"} & set(alone.command)


def test_the_users_flags_win(tmp_path: Path) -> None:
    theirs = '--dtype=half --kv_transfer_config \'{"kv_role": "kv_both"}\' --no-enable-prompt-tokens-details'
    text = f"model: m\nnodes: [{{name: n}}]\ninstances: [{{name: c, node: n, flags: {json.dumps(theirs)}}}]\n"
    command = planned(tmp_path, text)["c"].command
    names = [flag_name(it) for it in command]
    assert names.count("--dtype") == names.count("--kv-transfer-config") == 1
    assert "--dtype=half" in command and "--enable-prompt-tokens-details" not in command
    assert command[-4:] == ("--dtype=half", "--kv_transfer_config", '{"kv_role": "kv_both"}', theirs.split()[-1])


def test_a_cpu_computes_in_float32_and_is_shared_out(tmp_path: Path) -> None:
    plan = planned(tmp_path, "model: m\ninstances: [{name: c, count: 2}]\n")
    assert value_of(plan["c-0"], "--dtype") == "float32"
    assert [plan[it].environment["VLLM_CPU_OMP_THREADS_BIND"] for it in ("c-0", "c-1")] == ["0,1", "2,3"]
    assert plan["c-0"].environment["VLLM_CPU_KVCACHE_SPACE"] == "4"
    able = Machine(cores=(0,), memory_bytes=1 << 30, bfloat16=True)
    plan = planned(tmp_path, "model: m\ninstances: [{name: c, count: 3, ranks: 2}]\n", able)
    assert value_of(plan["c-0"], "--dtype") == "bfloat16"
    assert {plan[f"c-{it}"].environment["VLLM_CPU_OMP_THREADS_BIND"] for it in range(3)} == {"0|0"}
    assert plan["c-0"].environment["VLLM_CPU_KVCACHE_SPACE"] == "1"


def test_what_the_user_binds_stays(tmp_path: Path) -> None:
    text = "model: m\ninstances:\n  - {name: c, environment: {VLLM_CPU_OMP_THREADS_BIND: 3}}\n  - {name: d}\n"
    plan = planned(tmp_path, text)
    assert plan["c"].environment["VLLM_CPU_OMP_THREADS_BIND"] == "3"
    assert plan["d"].environment["VLLM_CPU_OMP_THREADS_BIND"] == "0,1,2,3"


def test_gpus_are_given_out_by_what_each_engine_needs(tmp_path: Path) -> None:
    text = "model: m\ninstances: [{name: a, flags: --tensor-parallel-size=2}, {name: b, ranks: 1, flags: [-tp, 1]}]\n"
    plan = planned(tmp_path, text, GPU)
    assert [plan[it].environment["CUDA_VISIBLE_DEVICES"] for it in ("a", "b")] == ["0,1", "2"]
    assert "--dtype" not in plan["a"].command and "VLLM_CPU_KVCACHE_SPACE" not in plan["a"].environment
    with pytest.raises(ConfigError, match="5 GPUs are needed and there are 4"):
        planned(tmp_path, "model: m\ninstances: [{name: a, count: 5}]\n", GPU)
    shared = "model: m\nenvironment: {CUDA_VISIBLE_DEVICES: 0}\ninstances: [{name: a, count: 5}]\n"
    assert planned(tmp_path, shared, GPU)["a-4"].environment["CUDA_VISIBLE_DEVICES"] == "0"


def test_a_node_gets_its_settings_by_its_environment(tmp_path: Path) -> None:
    plan = planned(tmp_path, WHOLE)
    assert plan["near"].command == ("python3", "-m", "headwater", "node", "--socket", "unix:/run/hw/near.sock")
    assert plan["near"].environment == {
        "HEADWATER_NODE_CLUSTER": "blue",
        "HEADWATER_NODE_DIRECTORY": "redis+unix:///run/hw/directory.sock",
        "HEADWATER_NODE_HOST_MEMORY": "1GiB",
        "HEADWATER_NODE_LABELS": "zone=a",
        "HEADWATER_NODE_METRICS": "127.0.0.1:7480",
        "HEADWATER_NODE_NAME": "near",
        "HEADWATER_NODE_PREFAULT": "false",
        "HEADWATER_NODE_REMOTES": "redis://kv:6379 s3://kv/a",
    }


def test_what_is_shown_has_no_secrets(tmp_path: Path) -> None:
    text = json.dumps([it.shown() for it in plan_of(tmp_path, WHOLE).processes])
    assert "hf_canary" not in text and SECRET not in text and '"HF_TOKEN": "***"' in text
    assert SECRET not in repr(plan_of(tmp_path, WHOLE))


def test_this_host_can_be_looked_at() -> None:
    machine, (programs, missing) = look(), find_programs()
    assert machine.cores and machine.memory_bytes > 1 << 30
    assert ("vllm" in missing) == (programs.vllm == "vllm")
