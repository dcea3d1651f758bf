"""The fake model's dimensions, and vLLM's own configuration objects for it."""

import copy
import functools
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engines.oracle import VOCABULARY
from tests.engines.vllm_names import (
    CacheConfig,
    DeviceConfig,
    EncoderCacheManager,
    FullAttentionSpec,
    KVTransferConfig,
    MLAAttentionSpec,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SlidingWindowSpec,
    VllmConfig,
    init_none_hash,
    sha256,
    torch,
)


@dataclass(frozen=True)
class Shape:
    """The fake model and the engine's limits. `window_tokens` > 0 adds a second KV group of sliding-window layers.

    `dtype` is an element of 4 bytes, `order` vLLM's name for the physical order of a block.
    """

    blocks: int = 64
    block_tokens: int = 16
    layers: int = 2
    heads: int = 2
    head_size: int = 4
    window_tokens: int = 0
    window_layers: int = 2
    tp: int = 1
    pp: int = 1
    replicated: bool = False
    max_batch_tokens: int = 64
    max_requests: int = 8
    max_tokens: int = 512
    long_prefill_tokens: int = 0
    dtype: str = "float32"
    order: str = "LBHNC"


DENSE = Shape()


@functools.cache
def model_folder() -> str:
    """A folder with the configuration of a small Llama and no weights."""
    folder = Path(tempfile.mkdtemp(prefix="headwater-test-model-"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "num_hidden_layers": 8,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 8192,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@functools.cache
def block_hash() -> Callable[[Any], bytes]:
    init_none_hash(sha256)
    return sha256


@functools.cache
def model_config(max_tokens: int) -> Any:
    folder = model_folder()
    return ModelConfig(
        model=folder, tokenizer=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=max_tokens
    )


def make_config(
    shape: Shape, connector: str | None, extra: dict[str, Any], policy: str, asynchronous: bool
) -> VllmConfig:
    cache = CacheConfig(block_size=shape.block_tokens, enable_prefix_caching=True, num_gpu_blocks_override=shape.blocks)
    cache.kv_cache_layout = shape.order
    scheduling = SchedulerConfig(
        max_num_seqs=shape.max_requests,
        max_num_batched_tokens=shape.max_batch_tokens,
        max_model_len=shape.max_tokens,
        long_prefill_token_threshold=shape.long_prefill_tokens,
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
        async_scheduling=False,
        disable_hybrid_kv_cache_manager=False,
    )
    transfer = None
    if connector is not None:
        module, _, name = connector.rpartition(".")
        transfer = KVTransferConfig(
            kv_connector=name,
            kv_connector_module_path=module,
            kv_role="kv_both",
            kv_load_failure_policy=policy,
            kv_connector_extra_config=extra,
        )
    config = VllmConfig(
        model_config=copy.deepcopy(model_config(shape.max_tokens)),
        cache_config=cache,
        scheduler_config=scheduling,
        parallel_config=ParallelConfig(tensor_parallel_size=shape.tp, pipeline_parallel_size=shape.pp),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=transfer,
    )
    # The CPU platform turns this off in VllmConfig; the scheduler is to behave as on a GPU.
    config.scheduler_config.async_scheduling = asynchronous
    return config


def layers_of(shape: Shape) -> list[dict[str, Any]]:
    """Each rank's attention layers and their KV."""
    common = {"block_size": shape.block_tokens, "head_size": shape.head_size, "dtype": getattr(torch, shape.dtype)}
    if shape.replicated:
        full = MLAAttentionSpec(num_kv_heads=1, max_tp_shards=1, **common)
    else:
        full = FullAttentionSpec(num_kv_heads=shape.heads, **common)
    specs: list[Any] = [full] * shape.layers
    if shape.window_tokens:
        window = SlidingWindowSpec(num_kv_heads=shape.heads, sliding_window=shape.window_tokens, **common)
        specs += [window] * shape.window_layers
    names = {f"model.layers.{n}.self_attn.attn": spec for n, spec in enumerate(specs)}
    ranks = []
    for rank in range(shape.tp * shape.pp):
        stage = rank // shape.tp
        ranks.append({name: spec for n, (name, spec) in enumerate(names.items()) if n % shape.pp == stage})
    return ranks


def allow_media(scheduler: Any, tokens: int) -> None:
    """Let a text-only model's scheduler take requests with media; their encoder is as fake as the model."""
    scheduler.max_num_encoder_input_tokens = tokens
    scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=tokens)
