"""Who an engine is: the Namespace and KVLayout that vLLM's own configuration implies.

Everything that changes KV bytes is read from the engine itself, never from what the operator called it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

from headwater.engines.vllm.metadata import RankLayout
from headwater.errors import ConfigError
from headwater.tiers.elements import element_bytes, element_type
from headwater.types import HitRule, KVGroup, KVLayout, Namespace

PIECE_BYTES = 32 << 20
HASH_THREADS = 8
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf", ".npz")
LOSSY_FROM = ("bfloat16", "float16", "float32")
REMEDY = "set engine.fingerprint to a value that changes whenever the weights do"
Stamp = tuple[tuple[str, int, int, int], ...]

log = logging.getLogger(__name__)


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
    kv_cache: KVCacheConfig,
    ranks: Ranks,
    chunk_tokens: int,
    reported: Mapping[tuple[int, int], RankLayout],
    lossy: str = "none",
) -> KVLayout:
    """The layout of a chunk over all ranks, as they reported it by (pp rank, tp rank); raises ConfigError. Only what
    may pass through a `lossy` codec says what its blocks are made of."""
    if len(reported) != ranks.world:
        raise ConfigError(f"{len(reported)} of {ranks.world} ranks have said what their KV cache looks like")
    for name in ("dtype", "layout"):
        values = sorted({str(getattr(it, name)) for it in reported.values()})
        if len(values) != 1:
            raise ConfigError(f"ranks have a KV cache {name} of {' and of '.join(values)}; they must be equal")
    groups = []
    for index, group in enumerate(kv_cache.kv_cache_groups):
        rule, window = hit_rule(group.kv_cache_spec)
        sizes = {it.block_bytes[index] for it in reported.values()}
        if len(sizes) != 1:
            raise ConfigError(f"KV group {index}: ranks have blocks of {sorted(sizes)} bytes; they must be equal")
        layers: dict[int, set[int]] = {shard: set() for shard in range(ranks.shards)}
        for (pp_rank, tp_rank), it in reported.items():
            layers[ranks.shard(pp_rank, tp_rank)].add(it.layers[index])
        if any(len(counts) != 1 for counts in layers.values()):
            raise ConfigError(f"KV group {index}: ranks of one stage have layers {layers}; they must be equal")
        counts = tuple(min(counts) for counts in layers.values())
        size = sizes.pop()
        channels = 0 if lossy == "none" else channels_of(group.kv_cache_spec, size, next(iter(reported.values())))
        groups.append(KVGroup(group.kv_cache_spec.block_size, size, counts, rule, window, channels))
    layout = KVLayout(chunk_tokens, tuple(groups))
    problem = layout.problem()
    if problem is not None:
        raise ConfigError(problem)
    return layout


def channels_of(spec: KVCacheSpec, block_bytes: int, rank: RankLayout) -> int:
    """How many elements of a block a lossy codec scales one by one: those of one token's K or V, or of one head where
    a block is ordered by heads first. Raises ConfigError where the codec cannot take this KV."""
    element = element_bytes(f"auto:{rank.dtype}")
    if element_type(f"auto:{rank.dtype}") not in LOSSY_FROM or not element:
        kinds = ", ".join(LOSSY_FROM)
        raise ConfigError(f"engine.lossy=int8 is for KV of {kinds}, this is {rank.dtype}; set it to none")
    inner = getattr(spec, "kv_cache_specs", None)
    one = next(iter(inner.values())) if inner else spec
    head = int(getattr(one, "head_size", 0))
    order = rank.layout.upper()
    by_token = 0 <= order.find("N") < order.find("H")  # NHD, LBNHC: N counts tokens, H heads
    channels = head * int(getattr(one, "num_kv_heads", 0)) if by_token else head
    if not channels or block_bytes % (one.block_size * channels * element):
        raise ConfigError(f"engine.lossy=int8: blocks of {block_bytes} bytes are not of whole heads; set it to none")
    return channels


def namespace(
    config: VllmConfig,
    ranks: Ranks,
    layout: KVLayout,
    rank: RankLayout,
    tenant: str,
    fingerprint: str,
    lossy: str = "none",
) -> Namespace:
    """The engine's base Namespace, without a request's adapter and salt."""
    return Namespace(
        model=model_fingerprint(config, fingerprint),
        kv_dtype=f"{config.cache_config.cache_dtype}:{rank.dtype}",
        layout=layout_tag(config, rank),
        groups=layout.fingerprint(),
        parallel=ranks.tag,
        tenant=tenant,
        lossy="" if lossy == "none" else lossy,
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


def model_fingerprint(config: VllmConfig, weights: str = "") -> str:
    """A digest of the model's configuration and of its weights, for which `weights` may stand.

    Raises ConfigError if that is empty and the weights cannot be found.
    """
    model = config.model_config
    shape = model.hf_config.to_dict()
    shape.pop("_name_or_path", None)
    described = {
        "config": shape,
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "overrides": getattr(model, "hf_overrides", None) if isinstance(model.hf_overrides, dict) else None,
        # Some rotary embeddings choose their factors by the longest sequence that is served.
        "longest": model.max_model_len if "longrope" in json.dumps(shape, default=str).lower() else None,
        "weights": _load_format(config),
    }
    digest = hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode())
    if weights:
        digest.update(b"named:" + weights.encode())
    else:
        digest.update(weights_digest(str(_local_directory(model.model, getattr(model, "revision", None), REMEDY))))
    return digest.hexdigest()[:32]


def _load_format(config: VllmConfig) -> str:
    """How the weights are loaded; invented ones are nobody else's."""
    load = getattr(config, "load_config", None)
    name = str(getattr(load, "load_format", "auto"))
    return f"dummy:{uuid.uuid4().hex}" if "dummy" in name else name


@lru_cache(maxsize=64)
def weights_digest(directory: str) -> bytes:
    """A digest of all bytes of a directory's weight files; raises ConfigError if there are none.

    The engine has just read them, so they come from the page cache, and pieces are hashed side by side: about
    1.5 GB/s a core. Files of a Hugging Face cache are links to blobs named by their SHA-256, which is taken as it is.
    """
    digest = hashlib.sha256()
    files = sorted(it for it in Path(directory).iterdir() if it.suffix in WEIGHT_SUFFIXES)
    if not files:
        raise ConfigError(f"no weight files in {directory}, so the model cannot be told from others; {REMEDY}")
    with ThreadPoolExecutor(min(os.cpu_count() or 1, HASH_THREADS), "headwater-hash") as pool:
        for file in files:
            digest.update(f"{file.name}:{file.stat().st_size}\n".encode())
            blob = _blob_digest(file)
            if blob is not None:
                digest.update(blob)
                continue
            for piece in pool.map(partial(_piece_digest, file), range(0, file.stat().st_size, PIECE_BYTES)):
                digest.update(piece)
    return digest.digest()


def _piece_digest(file: Path, offset: int) -> bytes:
    with file.open("rb") as opened:
        opened.seek(offset)
        return hashlib.sha256(opened.read(PIECE_BYTES)).digest()


def _blob_digest(file: Path) -> bytes | None:
    """The SHA-256 by which a Hugging Face cache names a large file's blob."""
    target = file.resolve()
    if not file.is_symlink() or target.parent.name != "blobs" or len(target.name) != 64:
        return None
    try:
        return bytes.fromhex(target.name)
    except ValueError:
        return None


class Adapters:
    """The content ids of the LoRA adapters that an engine serves: same name, new version, new id."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], tuple[Path, Stamp, str]] = {}

    def content_id(self, lora: Any) -> str | None:
        """Empty without an adapter; None if nobody can say which weights the engine has under this name.

        vLLM reads an adapter's files when it first needs its id, and again after it has dropped it. So files that
        have changed since we first met that id may be in use or not, and those of an adapter that is loaded in place
        may change at any time: such requests keep out of the cache.
        """
        if lora is None:
            return ""
        if getattr(lora, "load_inplace", False):
            return None
        try:
            return self._digest(lora.lora_int_id, lora.lora_path)
        except (ConfigError, OSError) as error:
            log.warning("adapter %s is not cached: %s", lora.lora_name, error)
            return None

    def _digest(self, number: int, location: str) -> str | None:
        known = self._known.get((number, location))
        if known is None:
            directory = _local_directory(os.path.expanduser(location), None, "load it from a directory")
            # The stamp first: files that change while they are read must not match it later.
            known = directory, _stamp(directory), weights_digest_of_adapter(str(directory)).hex()[:32]
            self._known[number, location] = known
        directory, stamp, digest = known
        return digest if _stamp(directory) == stamp else None


def _stamp(directory: Path) -> Stamp:
    """What changes when somebody writes to a directory's files."""
    found = [(it.name, it.stat()) for it in directory.iterdir() if it.is_file()]
    return tuple(sorted((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in found))


def weights_digest_of_adapter(path: str) -> bytes:
    """Adapters are small: every byte of every file."""
    digest = hashlib.sha256()
    for file in sorted(it for it in Path(path).iterdir() if it.is_file()):
        digest.update(f"{file.name}:{file.stat().st_size}\n".encode())
        with file.open("rb") as opened:
            while part := opened.read(1 << 20):
                digest.update(part)
    return digest.digest()


def _local_directory(model: str, revision: str | None, remedy: str) -> Path:
    if os.path.isdir(model):
        return Path(model)
    from huggingface_hub import snapshot_download  # comes with vLLM; finds what vLLM itself has downloaded

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the files of {model!r} are not on this machine ({error}); {remedy}") from error
