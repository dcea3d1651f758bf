"""Which layers of a model are of which kind, and what each keeps, from its config.json."""

from __future__ import annotations

from collections import Counter

from headwater.errors import ConfigError
from headwater.plan.keys import Keys
from headwater.plan.shapes import LayerGroup, LayerKind

KINDS = {
    "full_attention": LayerKind.FULL,
    "attention": LayerKind.FULL,
    "sliding_attention": LayerKind.WINDOW,
    "chunked_attention": LayerKind.CHUNKED,
    "linear_attention": LayerKind.STATE,
}
"""The words of `layer_types`."""
LAYERS_MAX = 10_000
"""Each is looked at on its own; the deepest models have a few hundred."""


def layer_kinds(keys: Keys, model: str) -> list[LayerKind]:
    """The kind of each layer, in order."""
    count = keys.number("num_hidden_layers", most=LAYERS_MAX)
    if names := keys.names("layer_types"):
        return _told(keys, names, count)
    if keys.has("kv_lora_rank"):
        return [LayerKind.LATENT] * count
    if model == "gemma2":
        return _pattern(count, LayerKind.WINDOW, 2)
    if model == "gemma3_text":
        every = keys.number("sliding_window_pattern", keys.number("_sliding_window_pattern", 6))
        return _pattern(count, LayerKind.WINDOW, every)
    if model == "gpt_oss":
        return _pattern(count, LayerKind.WINDOW, 2)
    if model == "llama4_text":
        return _pattern(count, LayerKind.CHUNKED, keys.number("no_rope_layer_interval", 4))
    if model == "qwen3_next":
        return _pattern(count, LayerKind.STATE, keys.number("full_attention_interval", 4))
    if model == "jamba":
        every, offset = keys.number("attn_layer_period", 8), keys.number("attn_layer_offset", 4, least=0)
        return [LayerKind.FULL if layer % every == offset else LayerKind.STATE for layer in range(count)]
    if keys.has("sliding_window") and keys.truth("use_sliding_window", default=model == "mistral"):
        first = keys.number("max_window_layers", 0, least=0)
        return [LayerKind.WINDOW if layer >= first else LayerKind.FULL for layer in range(count)]
    return [LayerKind.FULL] * count


def _told(keys: Keys, names: list[str], count: int) -> list[LayerKind]:
    if unknown := [name for name in names if name not in KINDS]:
        raise ConfigError(
            f"{keys.file}: layer_types has {unknown[0]!r}, of which it is not known what it keeps; "
            f"known are {', '.join(KINDS)}"
        )
    if len(names) != count:
        raise ConfigError(f"{keys.file}: layer_types names {len(names)} layers, num_hidden_layers={count}; correct one")
    return [KINDS[name] for name in names]


def _pattern(count: int, kind: LayerKind, every: int) -> list[LayerKind]:
    """Each `every`-th layer has full attention, all others are of a kind."""
    return [LayerKind.FULL if (layer + 1) % every == 0 else kind for layer in range(count)]


def layer_groups(keys: Keys, model: str) -> tuple[LayerGroup, ...]:
    """The layers of each kind as one group, those with full attention first."""
    counts = Counter(layer_kinds(keys, model))
    return tuple(_group(keys, model, kind, counts[kind]) for kind in LayerKind if counts[kind])


def _group(keys: Keys, model: str, kind: LayerKind, layers: int) -> LayerGroup:
    if kind is LayerKind.STATE:
        return LayerGroup(kind, layers, state_elements=state_elements(keys, model))
    heads = keys.number("num_attention_heads")
    if kind is LayerKind.LATENT:
        latent, rope = keys.number("kv_lora_rank"), keys.number("qk_rope_head_dim")
        query = keys.number("qk_nope_head_dim") + rope
        return LayerGroup(kind, layers, latent + rope, pair_flops=2 * heads * (query + keys.number("v_head_dim")))
    kv_heads, size = keys.number("num_key_value_heads", heads), head_dim(keys)
    if heads % kv_heads:
        raise ConfigError(
            f"{keys.file}: num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}; correct one"
        )
    window = 0
    if kind is LayerKind.WINDOW:
        window = keys.number("sliding_window")
    elif kind is LayerKind.CHUNKED:
        window = keys.number("attention_chunk_size")
    return LayerGroup(kind, layers, 2 * kv_heads * size, kv_heads, window, pair_flops=4 * heads * size)


def head_dim(keys: Keys) -> int:
    """The size of a head; where it is not said, the hidden size by the heads."""
    heads = keys.number("num_attention_heads")
    return keys.number("head_dim", keys.number("hidden_size") // heads or 1)


def state_elements(keys: Keys, model: str) -> int:
    """What one recurrent layer keeps of a request: the last inputs of its convolution, and its state.

    As vLLM allocates them. Gated DeltaNet: (kernel - 1) * (2 * K + V) + V heads * K size * V size, where K and V are
    heads * size. Mamba 1: (kernel - 1) * inner + inner * state size.
    """
    if model == "jamba":
        inner = keys.number("mamba_expand", 2) * keys.number("hidden_size")
        return inner * (keys.number("mamba_d_conv", 4) - 1 + keys.number("mamba_d_state", 16))
    key_size, value_size = keys.number("linear_key_head_dim"), keys.number("linear_value_head_dim")
    value_heads = keys.number("linear_num_value_heads")
    convolved = 2 * keys.number("linear_num_key_heads") * key_size + value_heads * value_size
    return (keys.number("linear_conv_kernel_dim") - 1) * convolved + value_heads * key_size * value_size
