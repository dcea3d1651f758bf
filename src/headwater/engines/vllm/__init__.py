"""headwater's plug-in for vLLM: name it in `--kv-transfer-config` as `HeadwaterConnector`."""

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from headwater.engines.vllm.connector import HeadwaterConnector

__all__ = ["HeadwaterConnector", "register"]


def register() -> None:
    """Make the name known to vLLM; the `vllm.general_plugins` entry point, safe to call again."""
    if HeadwaterConnector.__name__ not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(HeadwaterConnector.__name__, __name__, HeadwaterConnector.__name__)
