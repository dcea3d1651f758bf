"""Who an engine is: the Namespace and KVLayout that vLLM's own configuration implies.

Everything that changes KV bytes is read from the engine itself, never from what the operator called it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

from headwater.engines.vllm.metadata import RankLayout
from headwater.errors import ConfigError
from headwater.types import HitRule, KVGroup, KVLayout, Namespace

SAMPLE_BYTES = 64 << 10
SAMPLES = 64
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf", ".npz")


@dataclass(frozen=True)
class Ranks:
    """How an engine's KV is spread: `replicas` consecutive tensor-parallel ranks hold the same bytes."""

    tp: int
    pp: int
    replicas: int

    @property
    def world(self) -> int:
        """All ranks."""
        return self.tp * self.pp

    @property
    def shards(self) -> int:
        """Ranks whose bytes differ."""
        return self.pp * (self.tp // self.replicas)

    def shard(self, pp_rank: int, tp_rank: int) -> int:
        """The shard that a rank holds."""
        return pp_rank * (self.tp // self.replicas) + tp_rank // self.replicas

    def writes(self, tp_rank: int) -> bool:
        """Whether a rank is the one that saves its shard."""
        return tp_rank % self.replicas == 0

    @property
    def tag(self) -> str:
        """The parallel layout's name in the Namespace."""
        return f"tp{self.tp}.pp{self.pp}.replicas{self.replicas}"


def ranks_of(config: VllmConfig, kv_cache: KVCacheConfig) -> Ranks:
    """The engine's ranks; raises ConfigError for context parallelism, which shards tokens, not heads."""
    parallel = config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(f"{name}={getattr(parallel, name)}: headwater does not support context parallelism yet")
    replicas = getattr(kv_cache, "kv_tp_replicas", 1)
    return Ranks(parallel.tensor_parallel_size, parallel.pipeline_parallel_size, replicas)


WHOLE = ("FullAttentionSpec", "MLAAttentionSpec", "SinkFullAttentionSpec")
WINDOWED = ("SlidingWindowSpec", "SlidingWindowMLASpec")


def hit_rule(spec: KVCacheSpec) -> tuple[HitRule, int]:
    """Which chunks a group needs, and its window in tokens (0 without one).

    Raises ConfigError for every kind that is not known to be one of these: vLLM derives kinds with other block
    tables from them (middle blocks that become null, states that are not at the block boundary), and taking such
    a kind for its parent would be silent corruption.
    """
    inner = getattr(spec, "kv_cache_specs", None)  # ranks see a group of unequal layers as one spec for each
    if inner:
        spec = next(iter(inner.values()))
    kind = type(spec).__name__
    if kind in WHOLE:
        return HitRule.ALL, 0
    if kind in WINDOWED:
        return HitRule.WINDOW, int(spec.sliding_window) + int(getattr(spec, "extra_retained_tokens", 0) or 0)
    raise ConfigError(
        f"KV cache of kind {kind} cannot be shared by prefix yet (supported: {', '.join(WHOLE + WINDOWED)}); "
        "serve this model without headwater"
    )


def chunk_tokens_for(kv_cache: KVCacheConfig, wanted: int) -> int:
    """The chunk size: the smallest multiple of all groups' block sizes that is at least `wanted`."""
    unit = math.lcm(*(group.kv_cache_spec.block_size for group in kv_cache.kv_cache_groups))
    return -(-wanted // unit) * unit


def rank_layout_from_config(kv_cache: KVCacheConfig, dtype: str) -> RankLayout:
    """What a rank's tensors should look like, from the configuration alone (no rank has reported)."""
    groups = kv_cache.kv_cache_groups
    return RankLayout(
        layers=tuple(len(group.layer_names) for group in groups),
        block_bytes=tuple(int(group.kv_cache_spec.page_size_bytes) for group in groups),
        dtype=dtype,
        layout=getattr(kv_cache, "kv_cache_layout", None) or "default",
    )


def kv_layout(
    kv_cache: KVCacheConfig, ranks: Ranks, chunk_tokens: int, reported: Mapping[tuple[int, int], RankLayout]
) -> KVLayout:
    """The layout of a chunk over all ranks, as they reported it by (pp rank, tp rank); raises ConfigError."""
    groups = []
    for index, group in enumerate(kv_cache.kv_cache_groups):
        rule, window = hit_rule(group.kv_cache_spec)
        sizes = {it.block_bytes[index] for it in reported.values()}
        if len(sizes) != 1:
            raise ConfigError(f"KV group {index}: ranks have blocks of {sorted(sizes)} bytes; they must be equal")
        layers = [0] * ranks.shards
        for (pp_rank, tp_rank), it in reported.items():
            layers[ranks.shard(pp_rank, tp_rank)] = it.layers[index]
        groups.append(KVGroup(group.kv_cache_spec.block_size, sizes.pop(), tuple(layers), rule, window))
    layout = KVLayout(chunk_tokens, tuple(groups))
    problem = layout.problem()
    if problem is not None:
        raise ConfigError(problem)
    return layout


def namespace(
    config: VllmConfig, ranks: Ranks, layout: KVLayout, rank: RankLayout, tenant: str, fingerprint: str
) -> Namespace:
    """The engine's base Namespace, without a request's adapter and salt."""
    return Namespace(
        model=fingerprint or model_fingerprint(config),
        kv_dtype=f"{config.cache_config.cache_dtype}:{rank.dtype}",
        layout=layout_tag(config, rank),
        groups=layout.fingerprint(),
        parallel=ranks.tag,
        tenant=tenant,
    )


def layout_tag(config: VllmConfig, rank: RankLayout) -> str:
    """Backend, ISA, physical order and block size: blocks are opaque bytes that only their like can read."""
    device = config.device_config.device_type
    isa = ""
    if device == "cpu":
        # vLLM packs blocks for AMX where the CPU has it; torch's own capability names do not tell.
        amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
        isa = f"-{torch.backends.cpu.get_cpu_capability()}{'-AMX' if amx else ''}"
    attention = getattr(getattr(config, "attention_config", None), "backend", None)
    backend = getattr(attention, "name", None) or "auto"
    version = ".".join(vllm.__version__.split("+")[0].split(".")[:2])
    return f"vllm{version}/{device}{isa}/{backend}/{rank.layout}/b{config.cache_config.block_size}"


def model_fingerprint(config: VllmConfig) -> str:
    """A digest of the model's configuration and weights; raises ConfigError if the weights cannot be found."""
    model = config.model_config
    directory = _local_directory(model.model, getattr(model, "revision", None))
    shape = model.hf_config.to_dict()
    shape.pop("_name_or_path", None)
    described = {
        "config": shape,
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "overrides": getattr(model, "hf_overrides", None) if isinstance(model.hf_overrides, dict) else None,
    }
    digest = hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode())
    digest.update(weights_digest(str(directory)))
    return digest.hexdigest()[:32]


@lru_cache(maxsize=64)
def weights_digest(directory: str) -> bytes:
    """A digest of a directory's weight files: names, sizes, heads and evenly spread samples of each.

    Hashing 140 GB in full would take minutes at each start; a fine-tune changes every tensor, so 64 samples of
    64 KiB a file and its head (for safetensors: names, shapes, offsets) tell models apart.
    """
    digest = hashlib.sha256()
    files = sorted(it for it in Path(directory).iterdir() if it.suffix in WEIGHT_SUFFIXES)
    if not files:
        raise ConfigError(
            f"no weight files in {directory}, so the model cannot be told from others; "
            "set engine.fingerprint to a value that changes whenever the weights do"
        )
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}\n".encode())
        step = max(size // SAMPLES, SAMPLE_BYTES)
        with file.open("rb") as opened:
            for offset in range(0, size, step):
                opened.seek(offset)
                digest.update(opened.read(SAMPLE_BYTES))
    return digest.digest()


def adapter_id(lora: Any) -> str:
    """The content id of a request's LoRA adapter, empty without one: same name, new version, new id."""
    if lora is None:
        return ""
    path = Path(lora.lora_path)
    if not path.is_dir():
        return f"{lora.lora_name}:{lora.lora_path}"
    newest = max((it.stat().st_mtime_ns for it in path.iterdir() if it.is_file()), default=0)
    return _adapter_digest(str(path), newest)


@lru_cache(maxsize=1024)
def _adapter_digest(path: str, newest: int) -> str:
    digest = hashlib.sha256(weights_digest_of_adapter(path))
    return digest.hexdigest()[:32]


def weights_digest_of_adapter(path: str) -> bytes:
    """Adapters are small: every byte of every file."""
    digest = hashlib.sha256()
    for file in sorted(it for it in Path(path).iterdir() if it.is_file()):
        digest.update(f"{file.name}:{file.stat().st_size}\n".encode())
        with file.open("rb") as opened:
            while part := opened.read(1 << 20):
                digest.update(part)
    return digest.digest()


def _local_directory(model: str, revision: str | None) -> Path:
    if os.path.isdir(model):
        return Path(model)
    from huggingface_hub import snapshot_download  # comes with vLLM; finds what vLLM itself has downloaded

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the files of model {model!r} are not on this machine ({error}); "
            "set engine.fingerprint to a value that changes whenever the weights do"
        ) from error
