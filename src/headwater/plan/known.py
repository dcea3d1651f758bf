"""Well-known models by name: the keys of their published config.json files that the plan reads."""

from __future__ import annotations

from headwater.errors import ConfigError
from headwater.plan.configs import read_shape
from headwater.plan.shapes import ModelShape
from headwater.values import nearest

Config = dict[str, object]


def _dense(
    model: str, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int, **more: object
) -> Config:
    return {
        "model_type": model, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocabulary, **more,
    }  # fmt: skip


def _llama3(hidden: int, inner: int, layers: int, heads: int) -> Config:
    return _dense("llama", hidden, inner, layers, heads, 8, 128256, max_position_embeddings=131072)


DEEPSEEK_V3 = _dense(
    "deepseek_v3", 7168, 18432, 61, 128, 128, 129280, max_position_embeddings=163840, kv_lora_rank=512,
    q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, moe_intermediate_size=2048,
    n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8, first_k_dense_replace=3,
    quantization_config={"quant_method": "fp8"},
)  # fmt: skip
GEMMA3: Config = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62,
        "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "sliding_window": 1024,
        "max_position_embeddings": 131072,
    },
}  # fmt: skip

CONFIGS: dict[str, Config] = {
    "llama-3.1-8b": _llama3(4096, 14336, 32, 32),
    "llama-3.1-70b": _llama3(8192, 28672, 80, 64),
    "llama-3.3-70b": _llama3(8192, 28672, 80, 64),
    "llama-3.1-405b": _llama3(16384, 53248, 126, 128),
    "llama-4-scout": _dense(
        "llama4_text", 5120, 8192, 48, 40, 8, 202048, head_dim=128, intermediate_size_mlp=16384, num_local_experts=16,
        num_experts_per_tok=1, attention_chunk_size=8192, interleave_moe_layer_step=1, no_rope_layer_interval=4,
        max_position_embeddings=10485760,
    ),
    "qwen2.5-7b": _dense("qwen2", 3584, 18944, 28, 28, 4, 152064, max_position_embeddings=32768),
    "qwen2.5-72b": _dense("qwen2", 8192, 29568, 80, 64, 8, 152064, max_position_embeddings=32768),
    "qwen3-8b": _dense("qwen3", 4096, 12288, 36, 32, 8, 151936, head_dim=128, max_position_embeddings=40960),
    "qwen3-32b": _dense("qwen3", 5120, 25600, 64, 64, 8, 151936, head_dim=128, max_position_embeddings=40960),
    "qwen3-30b-a3b": _dense(
        "qwen3_moe", 2048, 6144, 48, 32, 4, 151936, head_dim=128, moe_intermediate_size=768, num_experts=128,
        num_experts_per_tok=8, max_position_embeddings=40960,
    ),
    "qwen3-235b-a22b": _dense(
        "qwen3_moe", 4096, 12288, 94, 64, 4, 151936, head_dim=128, moe_intermediate_size=1536, num_experts=128,
        num_experts_per_tok=8, max_position_embeddings=40960,
    ),
    "qwen3-next-80b-a3b": _dense(
        "qwen3_next", 2048, 5120, 48, 16, 2, 151936, head_dim=256, full_attention_interval=4, linear_conv_kernel_dim=4,
        linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=16, linear_num_value_heads=32,
        moe_intermediate_size=512, shared_expert_intermediate_size=512, num_experts=512, num_experts_per_tok=10,
        max_position_embeddings=262144,
    ),
    "deepseek-v3": DEEPSEEK_V3,
    "deepseek-r1": DEEPSEEK_V3,
    "gpt-oss-20b": _dense(
        "gpt_oss", 2880, 2880, 24, 64, 8, 201088, head_dim=64, sliding_window=128, num_local_experts=32,
        num_experts_per_tok=4, max_position_embeddings=131072, quantization_config={"quant_method": "mxfp4"},
    ),
    "gpt-oss-120b": _dense(
        "gpt_oss", 2880, 2880, 36, 64, 8, 201088, head_dim=64, sliding_window=128, num_local_experts=128,
        num_experts_per_tok=4, max_position_embeddings=131072, quantization_config={"quant_method": "mxfp4"},
    ),
    "gemma-3-27b": GEMMA3,
    "mistral-7b-v0.3": _dense("mistral", 4096, 14336, 32, 32, 8, 32768, max_position_embeddings=32768),
    "mistral-small-24b": _dense("mistral", 5120, 32768, 40, 32, 8, 131072, head_dim=128, max_position_embeddings=32768),
    "mixtral-8x7b": _dense(
        "mixtral", 4096, 14336, 32, 32, 8, 32000, num_local_experts=8, num_experts_per_tok=2,
        max_position_embeddings=32768,
    ),
    "jamba-v0.1": _dense(
        "jamba", 4096, 14336, 32, 32, 8, 65536, num_experts=16, num_experts_per_tok=2, expert_layer_period=2,
        expert_layer_offset=1, attn_layer_period=8, attn_layer_offset=4, mamba_d_state=16, mamba_d_conv=4,
        mamba_expand=2, mamba_dt_rank=256, max_position_embeddings=262144,
    ),
    "smollm2-135m": _dense(
        "llama", 576, 1536, 30, 9, 3, 49152, tie_word_embeddings=True, max_position_embeddings=8192
    ),
}  # fmt: skip
"""As published with each model on the Hugging Face hub. Counted weights agree with the advertised ones (tests)."""


def known_shape(name: str) -> ModelShape:
    """The shape of a well-known model. Raises ConfigError that names the nearest."""
    lower = name.lower()
    if lower not in CONFIGS:
        raise ConfigError(
            f"MODEL {name!r} is neither a file nor a known model, the nearest is {nearest(lower, CONFIGS)!r}; "
            "give the path of a config.json, or see --list"
        )
    return read_shape(lower, f"table of known models, {lower}", CONFIGS[lower])
