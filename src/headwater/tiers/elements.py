"""What KV bytes are made of, as far as a Namespace tells."""

from __future__ import annotations

_BYTES = {
    "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "int8": 1, "uint8": 1,
}  # fmt: skip
_OTHER_NAMES = {"bf16": "bfloat16", "half": "float16", "fp16": "float16", "float": "float32", "fp32": "float32"}


def element_type(kv_dtype: str) -> str:
    """The name of the elements' type: `auto:bfloat16` is bfloat16, `fp8_e4m3:uint8` is fp8_e4m3.

    The engine's setting stands first and decides unless it is `auto`; then the tensors' type follows.
    """
    setting, _, tensors = kv_dtype.lower().partition(":")
    name = tensors if tensors and setting == "auto" else setting
    name = name.removeprefix("torch.")
    return _OTHER_NAMES.get(name, name)


def element_bytes(kv_dtype: str) -> int | None:
    """Bytes of one element; None where we do not know."""
    name = element_type(kv_dtype)
    return 1 if name.startswith(("fp8", "float8")) else _BYTES.get(name)
