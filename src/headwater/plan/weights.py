"""How many weights a model has, counted from its config.json, matrix by matrix."""

from __future__ import annotations

from headwater.plan.keys import Keys
from headwater.plan.layers import head_dim, layer_kinds
from headwater.plan.shapes import LayerKind, Weights

VOCABULARIES = {"gemma3_text": 262208, "gemma2": 256000}
"""Of models whose config.json leaves them to transformers."""


def count_weights(keys: Keys, model: str) -> Weights:
    """All weights of the language model, without an image encoder; norms are two vectors a layer and a last one."""
    hidden = keys.number("hidden_size")
    table = keys.number("vocab_size", VOCABULARIES.get(model)) * hidden
    kinds = layer_kinds(keys, model)
    dense = hidden + sum(_mixer(keys, model, kind) + 2 * hidden for kind in kinds)
    experts, chosen = _experts(keys)
    routed = 0
    for layer in range(len(kinds)):
        if experts and _is_routed(keys, model, layer):
            routed += experts * _gated(hidden, _expert_size(keys))
            dense += _shared(keys, model) + hidden * experts
        else:
            dense += _gated(hidden, keys.number("intermediate_size_mlp", keys.number("intermediate_size")))
    tied = keys.truth("tie_word_embeddings", default=model.startswith("gemma"))
    return Weights(table, table, tied, dense, routed, experts if routed else 0, chosen if routed else 0)


def _mixer(keys: Keys, model: str, kind: LayerKind) -> int:
    if kind is LayerKind.STATE:
        return _mamba(keys) if model == "jamba" else _delta_net(keys)
    return _latent(keys) if kind is LayerKind.LATENT else _attention(keys, model)


def _attention(keys: Keys, model: str) -> int:
    """Queries, keys, values and the output; Qwen3-Next makes a gate beside each query."""
    hidden, heads = keys.number("hidden_size"), keys.number("num_attention_heads")
    queries = heads * (2 if model == "qwen3_next" else 1)
    return hidden * head_dim(keys) * (queries + heads + 2 * keys.number("num_key_value_heads", heads))


def _latent(keys: Keys) -> int:
    """DeepSeek-V2, arXiv 2405.04434, section 2.1: queries through their own latent, where there is one."""
    hidden, heads, latent = keys.number("hidden_size"), keys.number("num_attention_heads"), keys.number("kv_lora_rank")
    nope, rope, value = keys.number("qk_nope_head_dim"), keys.number("qk_rope_head_dim"), keys.number("v_head_dim")
    query = heads * (nope + rope)
    rank = keys.number("q_lora_rank") if keys.has("q_lora_rank") else 0
    queries = rank * (hidden + query) if rank else hidden * query
    return queries + hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden


def _delta_net(keys: Keys) -> int:
    """Gated DeltaNet as in Qwen3-Next: q, k, v and the output's gate, two numbers a head, convolution, output."""
    hidden, value_heads = keys.number("hidden_size"), keys.number("linear_num_value_heads")
    key = keys.number("linear_num_key_heads") * keys.number("linear_key_head_dim")
    value = value_heads * keys.number("linear_value_head_dim")
    into = hidden * (2 * key + 2 * value + 2 * value_heads)
    return into + keys.number("linear_conv_kernel_dim") * (2 * key + value) + value * hidden


def _mamba(keys: Keys) -> int:
    """Mamba, arXiv 2312.00752: in, convolution, the step's, B's and C's projections, A, out."""
    hidden, state = keys.number("hidden_size"), keys.number("mamba_d_state", 16)
    inner = keys.number("mamba_expand", 2) * hidden
    rank = keys.number("mamba_dt_rank", -(-hidden // 16))
    steps = inner * (rank + 2 * state) + rank * inner
    return 3 * hidden * inner + inner * keys.number("mamba_d_conv", 4) + steps + inner * state


def _experts(keys: Keys) -> tuple[int, int]:
    for name in ("n_routed_experts", "num_experts", "num_local_experts"):
        if keys.has(name) and (experts := keys.number(name, least=0)) > 1:
            return experts, keys.number("num_experts_per_tok")
    return 0, 0


def _expert_size(keys: Keys) -> int:
    return keys.number("moe_intermediate_size", keys.number("intermediate_size"))


def _shared(keys: Keys, model: str) -> int:
    """Experts that every token meets, and where Qwen has one its gate."""
    hidden = keys.number("hidden_size")
    if keys.has("shared_expert_intermediate_size"):
        return _gated(hidden, keys.number("shared_expert_intermediate_size", least=0)) + hidden
    if model == "llama4_text":
        return _gated(hidden, keys.number("intermediate_size"))
    return keys.number("n_shared_experts", 0, least=0) * _gated(hidden, _expert_size(keys))


def _is_routed(keys: Keys, model: str, layer: int) -> bool:
    if model == "jamba":
        return layer % keys.number("expert_layer_period", 2) == keys.number("expert_layer_offset", 1, least=0)
    if model == "llama4_text":
        routed = keys.numbers("moe_layers")
        return layer in routed if routed else (layer + 1) % keys.number("interleave_moe_layer_step", 1) == 0
    if layer < keys.number("first_k_dense_replace", 0, least=0) or layer in keys.numbers("mlp_only_layers"):
        return False
    return (layer + 1) % keys.number("decoder_sparse_step", 1) == 0


def _gated(hidden: int, size: int) -> int:
    """Gate, up and down."""
    return 3 * hidden * size
