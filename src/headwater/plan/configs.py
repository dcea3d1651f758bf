"""A model's shape from its config.json, as Hugging Face models have it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from headwater.errors import ConfigError
from headwater.plan.keys import Keys
from headwater.plan.layers import layer_groups
from headwater.plan.shapes import ModelShape
from headwater.plan.weights import count_weights
from headwater.values import nearest

MODELS = (
    "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "deepseek_v2",
    "deepseek_v3", "kimi_k2", "gemma2", "gemma3_text", "gpt_oss", "llama4_text", "jamba",
)  # fmt: skip
"""The values of model_type whose layers and weights are counted."""
WIDTHS = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0}
MXFP4_BYTES = 17 / 32
"""32 numbers of 4 bits and a scale of 8: OCP Microscaling Formats, version 1.0."""
FILE_BYTES_MAX = 4 << 20


def read_config(path: Path) -> ModelShape:
    """The shape of the model whose config.json (or whose folder) is given. Raises ConfigError."""
    file = path / "config.json" if path.is_dir() else path
    try:
        with file.open("rb") as opened:
            content = json.loads(opened.read(FILE_BYTES_MAX))
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; give a model's config.json or its folder") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not JSON ({error}); give a model's config.json") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: not a JSON object; give a model's config.json")
    return read_shape(file.resolve().parent.name, str(file), content)


def read_shape(name: str, file: str, content: Mapping[str, object]) -> ModelShape:
    """The shape that a config.json's content describes; `file` is how errors call it. Raises ConfigError."""
    whole = Keys(file, content)
    keys = whole.part("text_config") if whole.has("text_config") else whole
    model = keys.text("model_type", f"{whole.text('model_type')}_text" if keys is not whole else None)
    if model not in MODELS:
        raise ConfigError(
            f"{file}: model_type={model!r} is not among those whose layers are known, the nearest is "
            f"{nearest(model, MODELS)!r}; known are {', '.join(MODELS)}"
        )
    width = _width(keys, whole)
    dense_width, routed_width = _weight_widths(whole if whole.has("quantization_config") else keys, width)
    return ModelShape(
        name=name,
        groups=layer_groups(keys, model),
        weights=count_weights(keys, model),
        hidden_size=keys.number("hidden_size"),
        kv_width=width,
        dense_width=dense_width,
        routed_width=routed_width,
        tokens_max=keys.number("max_position_embeddings", 0, least=0),
    )


def _width(keys: Keys, whole: Keys) -> float:
    """Bytes of an element of the model's own dtype; bfloat16 where it does not say."""
    for it in (keys, whole):
        for key in ("dtype", "torch_dtype"):
            if it.has(key):
                name = it.text(key)
                if name not in WIDTHS:
                    raise ConfigError(f"{it.file}: {key}={name!r} is not one of {', '.join(WIDTHS)}; correct it")
                return WIDTHS[name]
    return WIDTHS["bfloat16"]


def _weight_widths(keys: Keys, width: float) -> tuple[float, float]:
    """Bytes of a weight, and of a routed expert's. What a method leaves unquantized is counted as if it were not,
    other than of mxfp4, which quantizes routed experts only."""
    if not keys.has("quantization_config"):
        return width, width
    quantization = keys.part("quantization_config")
    method = quantization.text("quant_method")
    if method == "mxfp4":
        return width, MXFP4_BYTES
    if method == "fp8":
        return 1.0, 1.0
    if quantization.has("bits"):
        return quantization.number("bits") / 8, quantization.number("bits") / 8
    raise ConfigError(
        f"{quantization.file}: quant_method={method!r} does not say how wide a weight is; "
        "remove quantization_config from the file and give --weight-dtype"
    )
