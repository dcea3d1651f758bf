"""What the plug-in does not serve is refused at start, with the name of what is wrong and the remedy."""

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from headwater.engines.vllm import HeadwaterConnector, identity
from headwater.engines.vllm.metadata import RankLayout
from headwater.errors import ConfigError
from headwater.types import HitRule, KVLayout
from tests.engines.served import CHUNK, CONNECTOR, DENSE
from tests.engines.shape import make_config
from tests.engines.vllm_names import KVConnectorRole, kv_cache_interface

EXTRA = {"fingerprint": "test-model", "chunk_tokens": CHUNK}


def subclasses(kind: type) -> set[type]:
    """A class and everything derived from it."""
    return {kind}.union(*(subclasses(it) for it in kind.__subclasses__()))


KINDS = sorted(it.__name__ for it in subclasses(kv_cache_interface.KVCacheSpec))
KNOWN = {*identity.WHOLE, *identity.WINDOWED}


def spec(kind: str, **fields: Any) -> Any:
    """A group's spec of some kind with only the fields that matter here."""
    cls = getattr(kv_cache_interface, kind)
    it = cls.__new__(cls)
    for name, value in {"block_size": 16, **fields}.items():
        object.__setattr__(it, name, value)
    return it


def kv_cache(*specs: Any) -> Any:
    """vLLM's KVCacheConfig as far as the plug-in's start looks at it."""
    groups = [SimpleNamespace(kv_cache_spec=it, layer_names=["a", "b"]) for it in specs]
    return SimpleNamespace(kv_cache_groups=groups, num_blocks=8, kv_tp_replicas=1)


def start(cache: Any, extra: dict[str, Any] = EXTRA, policy: str = "recompute", **parallel: int) -> HeadwaterConnector:
    config = copy.copy(make_config(DENSE, CONNECTOR, extra, policy, False))
    config.parallel_config = copy.copy(config.parallel_config)
    for name, value in parallel.items():
        setattr(config.parallel_config, name, value)
    return HeadwaterConnector(config, KVConnectorRole.SCHEDULER, cache)


FULL = spec("FullAttentionSpec")


# ---- kinds of KV ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted({*KINDS} - KNOWN - {"KVCacheSpec", "UniformTypeKVCacheSpecs"}))
def test_a_kind_of_kv_that_is_not_known_is_refused_by_name(kind) -> None:
    """Whatever vLLM derives from a kind that we know: its blocks may mean something else."""
    for cache in (kv_cache(spec(kind)), kv_cache(FULL, spec(kind))):
        with pytest.raises(ConfigError, match=rf"of kind {kind} .*supported: FullAttentionSpec"):
            start(cache)
    ranks_see = spec("UniformTypeKVCacheSpecs", kv_cache_specs={"a": spec(kind)})
    with pytest.raises(ConfigError, match=kind):
        start(kv_cache(ranks_see))


def test_the_kinds_that_vllm_has_are_those_that_were_looked_at() -> None:
    """A new kind is refused until somebody has read what its blocks hold; this says that there is one to read."""
    assert {*KINDS} >= {"MambaSpec", "RSWASpec", "ChunkedLocalAttentionSpec", "CrossAttentionSpec", *KNOWN}
    assert {"MambaSpec", "RSWASpec", "CrossAttentionSpec"}.isdisjoint(KNOWN)


@pytest.mark.parametrize("kind", identity.WHOLE)
def test_kinds_that_keep_every_block(kind) -> None:
    assert identity.hit_rule(spec(kind)) == (HitRule.ALL, 0)
    # Without the hybrid allocator a window is only a mask: vLLM keeps all blocks.
    assert identity.hit_rule(spec(kind, sliding_window=128)) == (HitRule.ALL, 0)
    assert identity.hit_rule(spec("UniformTypeKVCacheSpecs", kv_cache_specs={"a": spec(kind)})) == (HitRule.ALL, 0)


@pytest.mark.parametrize("kind", identity.WINDOWED)
def test_kinds_that_keep_a_window(kind) -> None:
    assert identity.hit_rule(spec(kind, sliding_window=40)) == (HitRule.WINDOW, 40)
    retaining = spec(kind, sliding_window=40)
    object.__setattr__(retaining, "extra_retained_tokens", 3)
    assert identity.hit_rule(retaining) == (HitRule.WINDOW, 43)


# ---- settings ------------------------------------------------------------------------------------------


def test_a_load_failure_policy_that_fails_requests_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'kv_load_failure_policy=fail.*set "kv_load_failure_policy":"recompute"'):
        start(kv_cache(FULL), policy="fail")


@pytest.mark.parametrize("name", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_context_parallelism_is_refused(name) -> None:
    with pytest.raises(ConfigError, match=f"{name}=2"):
        start(kv_cache(FULL), **{name: 2})


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"chunk_token": 32}, r"unknown key 'chunk_token'.*nearest known key is 'chunk_tokens'"),
        ({"nodes": "unix:/a"}, r"unknown key 'nodes'.*'node'"),
        ({"host_memory": "4 parsecs"}, r"host_memory"),
        ({"node": "tcp://somewhere:1"}, r"node"),
        ({"load_s": -1}, r"load_s"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_meant_are_refused(extra, message) -> None:
    with pytest.raises(ConfigError, match=message):
        start(kv_cache(FULL), {**EXTRA, **extra})


def test_chunks_are_whole_blocks_of_every_group() -> None:
    cache = kv_cache(spec("FullAttentionSpec", block_size=48), spec("SlidingWindowSpec", block_size=32))
    assert [identity.chunk_tokens_for(cache, wanted) for wanted in (1, 96, 97, 256)] == [96, 96, 192, 288]


# ---- ranks ---------------------------------------------------------------------------------------------

MINE = RankLayout(layers=(2,), block_bytes=(1024,), dtype="float32", layout="LBHNC")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"dtype": "bfloat16"}, "dtype of bfloat16 and of float32"),
        ({"layout": "LBNHC"}, "layout of LBHNC and of LBNHC"),
        ({"block_bytes": (2048,)}, r"blocks of \[1024, 2048\] bytes"),
        ({"layers": (3,)}, "layers"),
    ],
    ids=str,
)
def test_ranks_that_differ_are_refused(other, message) -> None:
    """Two ranks that hold the same bytes, as those of MLA do."""
    ranks = identity.Ranks(tp=2, pp=1, replicas=2)
    reported = {(0, 0): MINE, (0, 1): RankLayout(**{**vars(MINE), **other})}
    assert identity.kv_layout(kv_cache(FULL), ranks, CHUNK, {**reported, (0, 1): MINE}).shards == 1
    with pytest.raises(ConfigError, match=message):
        identity.kv_layout(kv_cache(FULL), ranks, CHUNK, reported)


def test_a_rank_that_has_said_nothing_is_missed() -> None:
    with pytest.raises(ConfigError, match="1 of 4 ranks"):
        identity.kv_layout(kv_cache(FULL), identity.Ranks(tp=2, pp=2, replicas=1), CHUNK, {(0, 0): MINE})


def test_stages_may_have_different_numbers_of_layers() -> None:
    ranks = identity.Ranks(tp=2, pp=2, replicas=1)
    layers = {(0, 0): 3, (0, 1): 3, (1, 0): 2, (1, 1): 2}
    reported = {rank: RankLayout(**{**vars(MINE), "layers": (count,)}) for rank, count in layers.items()}
    assert identity.kv_layout(kv_cache(FULL), ranks, CHUNK, reported).groups[0].shard_layers == (3, 3, 2, 2)


def test_what_a_lossy_codec_may_touch_is_part_of_the_layout() -> None:
    ranks = identity.Ranks(tp=1, pp=1, replicas=1)
    full = spec("FullAttentionSpec", head_size=8, num_kv_heads=2)
    mine = replace(MINE, dtype="torch.bfloat16", block_bytes=(2 * 16 * 2 * 8 * 2,), layout="HND")

    def layout(rank: RankLayout, lossy: str) -> KVLayout:
        return identity.kv_layout(kv_cache(full), ranks, CHUNK, {(0, 0): rank}, lossy)

    exact, lossy = layout(mine, "none"), layout(mine, "int8")
    assert ([it.channels for it in exact.groups], [it.channels for it in lossy.groups]) == ([0], [8])
    assert exact.fingerprint() != lossy.fingerprint()
    assert layout(replace(mine, layout="NHD"), "int8").groups[0].channels == 16
    with pytest.raises(ConfigError, match=r"int8 is for KV of bfloat16, float16, float32, this is torch\.uint8"):
        layout(replace(mine, dtype="torch.uint8"), "int8")
    with pytest.raises(ConfigError, match="blocks of 1000 bytes are not of whole heads"):
        layout(replace(mine, block_bytes=(1000,)), "int8")
