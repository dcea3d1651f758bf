"""What plugs headwater into vLLM: the value of --kv-transfer-config."""

from __future__ import annotations


def transfer_config(socket: str, engine_id: str | None = None) -> dict[str, object]:
    """For an engine that shares the node at `socket`; by its id, the Conductor knows it among that node's engines."""
    return {
        "kv_connector": "HeadwaterConnector",
        "kv_connector_module_path": "headwater.engines.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        **({} if engine_id is None else {"engine_id": engine_id}),
        "kv_connector_extra_config": {"node": socket},
    }
