"""What the engine tests use of vLLM, imported in one place and without its warnings."""

import os
import warnings

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        KVTransferConfig,
        ModelConfig,
        ParallelConfig,
        SchedulerConfig,
        VllmConfig,
    )
    from vllm.distributed import parallel_state
    from vllm.distributed.kv_transfer import kv_transfer_state
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, KVConnectorRole, SupportsHMA
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorMetadata,
        KVConnectorTransferResults,
        KVConnectorWorkerMetadata,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm
    from vllm.forward_context import set_forward_context
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1 import kv_cache_interface
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
    from vllm.v1.core.kv_cache_utils import (
        generate_scheduler_kv_cache_config,
        get_kv_cache_configs,
        get_request_block_hasher,
        init_none_hash,
        resolve_kv_cache_block_sizes,
    )
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
    from vllm.v1.request import Request, RequestStatus
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
    from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin
    from vllm.v1.worker.utils import allocate_kv_cache

__all__ = [
    "EMPTY_MODEL_RUNNER_OUTPUT",
    "ActiveKVConnector",
    "AsyncScheduler",
    "CacheConfig",
    "DeviceConfig",
    "EncoderCacheManager",
    "FullAttentionSpec",
    "KVConnectorBase_V1",
    "KVConnectorFactory",
    "KVConnectorLogging",
    "KVConnectorMetadata",
    "KVConnectorModelRunnerMixin",
    "KVConnectorProm",
    "KVConnectorRole",
    "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata",
    "KVOutputAggregator",
    "KVTransferConfig",
    "LoRARequest",
    "MLAAttentionSpec",
    "ModelConfig",
    "ModelRunnerOutput",
    "MultiModalFeatureSpec",
    "ParallelConfig",
    "PlaceholderRange",
    "Request",
    "RequestStatus",
    "SamplingParams",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerOutput",
    "SlidingWindowSpec",
    "StructuredOutputManager",
    "SupportsHMA",
    "VllmConfig",
    "allocate_kv_cache",
    "generate_scheduler_kv_cache_config",
    "get_kv_cache_configs",
    "get_request_block_hasher",
    "init_none_hash",
    "kv_cache_interface",
    "kv_transfer_state",
    "parallel_state",
    "resolve_kv_cache_block_sizes",
    "set_forward_context",
    "sha256",
    "torch",
]
