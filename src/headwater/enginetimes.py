"""How long an engine's steps take: polynomials that are given, measured, or fitted, for routing and simulation alike.

    prefill   fixed + token * n + token2 * n^2 + context * n * c      n tokens that follow c tokens already there
    decode    fixed + request * r + kv * t + kv2 * t^2                r requests with t tokens of KV in all

The quadratic parts are attention's; `kv2` may be negative, as fits over a bounded range often are.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """Seconds of one engine's steps; a step has at most `step_tokens` prompt tokens and `requests_max` requests."""

    prefill_fixed_s: float
    prefill_token_s: float
    prefill_token2_s: float = 0.0
    prefill_context_s: float = 0.0
    decode_fixed_s: float = 0.0
    decode_request_s: float = 0.0
    decode_kv_s: float = 0.0
    decode_kv2_s: float = 0.0
    step_tokens: int = 8192
    requests_max: int = 256

    def __post_init__(self) -> None:
        assert self.step_tokens > 0 and self.requests_max > 0, f"{self.step_tokens=}, {self.requests_max=}"
        assert self.prefill_token_s > 0, f"{self.prefill_token_s=}"

    def step_s(self, tokens: int, context: int = 0) -> float:
        """One step that computes `tokens` prompt tokens after `context` tokens of the same request."""
        if tokens <= 0:
            return 0.0
        each = self.prefill_token_s + self.prefill_token2_s * tokens + self.prefill_context_s * context
        return self.prefill_fixed_s + tokens * each

    def prefill_s(self, tokens: int, context: int = 0) -> float:
        """A prompt's `tokens` uncached tokens after `context` cached ones, step by step, on an idle engine."""
        if tokens <= 0:
            return 0.0
        size = self.step_tokens
        whole, rest = divmod(tokens, size)
        # The whole steps' contexts are context, context + size, ...: their sum in closed form.
        contexts = whole * context + size * (whole * (whole - 1) // 2)
        each = self.prefill_fixed_s + size * (self.prefill_token_s + self.prefill_token2_s * size)
        total = whole * each + self.prefill_context_s * size * contexts
        return total + self.step_s(rest, context + whole * size)

    def decode_s(self, requests: int, kv_tokens: float) -> float:
        """One decode step of `requests` requests whose contexts are `kv_tokens` long in all."""
        if requests <= 0:
            return 0.0
        kv_s = kv_tokens * (self.decode_kv_s + self.decode_kv2_s * kv_tokens)
        total = self.decode_fixed_s + self.decode_request_s * requests + kv_s
        return total if total > 0.0 else 0.0  # noqa: FURB136, max() takes three times as long
