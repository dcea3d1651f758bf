"""Shapes of models: weights as they are advertised, layers as they are built, and what is wrong with a config.json."""

import json
from pathlib import Path

import pytest

from headwater.errors import ConfigError
from headwater.plan.configs import read_config, read_shape
from headwater.plan.known import CONFIGS, known_shape
from headwater.plan.shapes import LayerGroup, LayerKind, Weights
from tests.conftest import MODEL

LLAMA = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        # Billions as the makers say, in reports or in the safetensors' own sums.
        ("llama-3.1-8b", 8.030, 8.030),
        ("llama-3.1-70b", 70.55, 70.55),
        ("llama-3.1-405b", 405.9, 405.9),
        ("qwen2.5-7b", 7.616, 7.616),
        ("qwen2.5-72b", 72.71, 72.71),
        ("qwen3-8b", 8.191, 8.191),
        ("qwen3-32b", 32.76, 32.76),
        ("qwen3-30b-a3b", 30.53, 3.353),
        ("qwen3-235b-a22b", 235.1, 22.19),
        ("deepseek-v3", 671.0, 36.6 + 0.927),  # 36.6 without the embedding, which has 129,280 * 7,168
        ("gpt-oss-120b", 116.8, 5.13 + 0.579),  # 5.13 without the embedding, which has 201,088 * 2,880
        ("gpt-oss-20b", 20.91, 3.61 + 0.579),
        ("mixtral-8x7b", 46.70, 12.88),
        ("mistral-7b-v0.3", 7.248, 7.248),
        ("mistral-small-24b", 23.57, 23.57),
        ("gemma-3-27b", 27.01, 27.01),
        ("jamba-v0.1", 51.57, 12.11),
        ("qwen3-next-80b-a3b", 79.67, 3.875),
        ("llama-4-scout", 107.8, 17.17),
    ],
)
def test_counted_weights_are_the_advertised_ones(name: str, total: float, active: float) -> None:
    found = known_shape(name).weights
    assert found.total / 1e9 == pytest.approx(total, rel=2e-3)
    assert found.active / 1e9 == pytest.approx(active, rel=2e-3)


def test_a_dense_model_is_counted_to_the_last_weight() -> None:
    # table 100 * 8; a layer: q and o 8 * 8 each, k and v 8 * 2 * 2 each, MLP 3 * 8 * 16, norms 2 * 8; a last norm 8.
    layer = 2 * 64 + 2 * 32 + 384 + 16
    found = read_shape("m", "m.json", LLAMA).weights
    assert (found.embedding, found.head, found.dense, found.routed) == (800, 800, 3 * layer + 8, 0)
    assert found.total == 1600 + 3 * layer + 8
    assert read_shape("m", "m.json", {**LLAMA, "tie_word_embeddings": True}).weights.total == 800 + 3 * layer + 8
    assert known_shape("llama-3.1-8b").weights.total == 8_030_261_248


@pytest.mark.skipif(not MODEL.exists(), reason="the model is not here; scripts/setup_env.py fetches it")
def test_a_real_folder() -> None:
    found = read_config(MODEL)
    assert found == read_config(MODEL / "config.json")
    assert found.weights == known_shape("smollm2-135m").weights
    assert found.weights.total == 134_515_008
    assert found.groups == known_shape("smollm2-135m").groups


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("llama-3.1-70b", {LayerKind.FULL: 80}),
        ("deepseek-r1", {LayerKind.LATENT: 61}),
        ("gpt-oss-120b", {LayerKind.FULL: 18, LayerKind.WINDOW: 18}),
        ("gemma-3-27b", {LayerKind.FULL: 10, LayerKind.WINDOW: 52}),  # 62 // 6 = 10
        ("qwen3-next-80b-a3b", {LayerKind.FULL: 12, LayerKind.STATE: 36}),
        ("jamba-v0.1", {LayerKind.FULL: 4, LayerKind.STATE: 28}),  # layers 4, 12, 20, 28
        ("llama-4-scout", {LayerKind.FULL: 12, LayerKind.CHUNKED: 36}),
    ],
)
def test_layers_by_kind(name: str, kinds: dict[LayerKind, int]) -> None:
    assert {it.kind: it.layers for it in known_shape(name).groups} == kinds


def test_what_layers_keep() -> None:
    latent = known_shape("deepseek-v3").groups[0]
    assert latent.token_elements == 512 + 64
    assert latent.pair_flops == 2 * 128 * (128 + 64 + 128)
    full, state = known_shape("qwen3-next-80b-a3b").groups
    assert full.token_elements == 2 * 2 * 256
    # Convolution: 3 of 2 * 16 * 128 + 32 * 128 numbers. State: 32 heads of 128 * 128.
    assert state.state_elements == 3 * 8192 + 524_288
    assert known_shape("jamba-v0.1").groups[1].state_elements == 8192 * (3 + 16)
    assert known_shape("llama-4-scout").groups[1].window_tokens == 8192


def test_layer_types_go_before_what_a_family_does() -> None:
    types = ["sliding_attention", "full_attention", "full_attention"]
    found = read_shape("m", "m.json", {**LLAMA, "layer_types": types, "sliding_window": 32}).groups
    assert [(it.kind, it.layers, it.window_tokens) for it in found] == [
        (LayerKind.FULL, 2, 0),
        (LayerKind.WINDOW, 1, 32),
    ]


def test_a_window_counts_where_it_is_used() -> None:
    def kinds(**more: object) -> list[tuple[LayerKind, int]]:
        return [
            (it.kind, it.layers) for it in read_shape("m", "m.json", {**LLAMA, "sliding_window": 32, **more}).groups
        ]

    assert kinds(model_type="mistral") == [(LayerKind.WINDOW, 3)]
    assert kinds(model_type="qwen2") == [(LayerKind.FULL, 3)]
    assert kinds(model_type="qwen2", use_sliding_window=False) == [(LayerKind.FULL, 3)]
    switched = kinds(model_type="qwen2", use_sliding_window=True, max_window_layers=1)
    assert switched == [(LayerKind.FULL, 1), (LayerKind.WINDOW, 2)]


def test_pairs_by_hand_and_one_by_one() -> None:
    full, window = LayerGroup(LayerKind.FULL, 1, 1), LayerGroup(LayerKind.WINDOW, 1, 1, window_tokens=4)
    chunked = LayerGroup(LayerKind.CHUNKED, 1, 1, window_tokens=4)
    assert full.pairs(10, 5) == 10 * 5 + 55
    assert window.pairs(6) == 1 + 2 + 3 + 4 + 4 + 4
    assert window.pairs(2, 4) == 4 + 4
    assert chunked.pairs(6) == 1 + 2 + 3 + 4 + 1 + 2
    assert chunked.pairs(3, 3) == 4 + 1 + 2
    assert LayerGroup(LayerKind.STATE, 1, state_elements=9).pairs(6) == 0
    for context in range(10):
        for tokens in range(10):
            places = range(context + 1, context + tokens + 1)
            assert window.pairs(tokens, context) == sum(min(place, 4) for place in places)
            assert chunked.pairs(tokens, context) == sum((place - 1) % 4 + 1 for place in places)


def test_experts_that_a_step_meets() -> None:
    it = Weights(embedding=0, head=0, tied=True, dense=100, routed=800, experts=8, chosen=2)
    assert it.layers_active == 100 + 800 * 2 // 8
    assert [it.met_experts(tokens) for tokens in (1, 2)] == [0.25, 0.4375]  # 1 - 3/4, 1 - 9/16
    assert Weights(0, 0, True, 100).met_experts(5) == 0


@pytest.mark.parametrize(
    ("quantization", "dense", "routed"),
    [
        ({"quant_method": "fp8"}, 1.0, 1.0),
        ({"quant_method": "mxfp4"}, 2.0, 17 / 32),
        ({"quant_method": "awq", "bits": 4}, 0.5, 0.5),
    ],
)
def test_quantized_weights(quantization: dict[str, object], dense: float, routed: float) -> None:
    found = read_shape("m", "m.json", {**LLAMA, "quantization_config": quantization})
    assert (found.dense_width, found.routed_width) == (dense, routed)


def test_dtypes() -> None:
    assert read_shape("m", "m.json", LLAMA).kv_width == 2
    assert read_shape("m", "m.json", {**LLAMA, "torch_dtype": "float32"}).kv_width == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "lama"}, "m.json: model_type='lama' is not among .* nearest is 'llama'"),
        ({"model_type": None}, "m.json: model_type is missing or no text"),
        ({"hidden_size": None}, "m.json: hidden_size is missing; add it"),
        ({"num_hidden_layers": 0}, "m.json: num_hidden_layers=0 is not a whole number from 1 to 10000"),
        ({"num_hidden_layers": 10**9}, "m.json: num_hidden_layers=1000000000 is not"),
        ({"num_hidden_layers": "3"}, "m.json: num_hidden_layers='3' is not"),
        ({"num_attention_heads": True}, "m.json: num_attention_heads=True is not a whole number"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
        ({"layer_types": ["full_attention"]}, "layer_types names 1 layers, num_hidden_layers=3"),
        ({"layer_types": ["odd"] * 3}, "layer_types has 'odd', of which it is not known what it keeps"),
        ({"layer_types": "full"}, "layer_types is not a list of names"),
        ({"layer_types": ["sliding_attention"] * 3}, "sliding_window is missing"),
        (
            {"mlp_only_layers": ["x"], "num_experts": 4, "num_experts_per_tok": 1},
            "mlp_only_layers is not a list of whole",
        ),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings=1 is neither true nor false"),
        ({"dtype": "int3"}, "dtype='int3' is not one of float32"),
        ({"kv_lora_rank": 512}, "qk_rope_head_dim is missing"),
        ({"quantization_config": {"quant_method": "odd"}}, "quant_method='odd' does not say how wide.* --weight-dtype"),
        ({"quantization_config": [4]}, "quantization_config is not an object"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_shape("m", "m.json", {**LLAMA, **change})


def test_files_that_are_no_config(tmp_path: Path) -> None:
    for content, message in ((b"{", "not JSON"), (b"[]", "not a JSON object"), (b"\xff\xfe", "not JSON")):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            read_config(tmp_path)
    with pytest.raises(ConfigError, match="absent: No such file"):
        read_config(tmp_path / "absent")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_config(tmp_path).name == tmp_path.name


def test_names_of_known_models() -> None:
    assert known_shape("Llama-3.1-70B").name == "llama-3.1-70b"
    with pytest.raises(ConfigError, match=r"MODEL 'lama-3\.1-8b' is neither .* nearest is 'llama-3\.1-8b'"):
        known_shape("lama-3.1-8b")
    assert all(name == name.lower() and known_shape(name).tokens_max for name in CONFIGS)
