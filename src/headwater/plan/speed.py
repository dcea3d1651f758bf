"""How long prefill and decode take: by a roofline over the GPU's data sheet, or by measured EngineTimes.

    prefill   n new tokens after c cached ones:
              operations = 2 * weights of the layers * n + 2 * head + sum over attention layers of pair_flops * pairs
              seconds = max(operations / (tp * FLOP/s * mfu), weights read / (tp * bandwidth * mbu))
    decode    one step of r requests with t tokens of KV in all:
              bytes = weights read by r tokens + KV of r requests of t / r tokens, on all ranks
              seconds = max(bytes / (tp * bandwidth * mbu), operations / (tp * FLOP/s * mfu))

Williams et al., "Roofline", CACM 2009. What GPUs say to each other, launches and sampling are in mfu and mbu, the
shares of the data sheet that are reached. A recurrent state's own operations are left out; its bytes are not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from headwater.enginetimes import EngineTimes
from headwater.plan.gpus import Gpu
from headwater.plan.kv import request_bytes
from headwater.plan.shapes import ModelShape


@dataclass(frozen=True, slots=True)
class Roofline:
    """Step times of an instance of `tp` GPUs from data sheets. `kv_width` is bytes of an element of KV."""

    shape: ModelShape
    gpu: Gpu
    tp: int = 1
    kv_width: float = 2.0
    mfu: float = 0.5
    mbu: float = 0.7

    @property
    def flops_s(self) -> float:
        """Operations a second that are reached."""
        return self.tp * self.gpu.flops_s * self.mfu

    @property
    def bytes_s(self) -> float:
        """Bytes of GPU memory read a second."""
        return self.tp * self.gpu.memory_bytes_s * self.mbu

    def prefill_flops(self, tokens: int, context: int = 0) -> int:
        """Operations of `tokens` new tokens after `context`; logits are made for the last one only."""
        it = self.shape.weights
        attention = sum(group.layers * group.pair_flops * group.pairs(tokens, context) for group in self.shape.groups)
        return 2 * (it.layers_active * tokens + it.head) + attention

    def prefill_s(self, tokens: int, context: int = 0) -> float:
        """A prompt's `tokens` uncached tokens after `context` cached ones, on an idle engine."""
        if tokens <= 0:
            return 0.0
        read_s = self.shape.step_weight_bytes(tokens) / self.bytes_s
        return max(self.prefill_flops(tokens, context) / self.flops_s, read_s)

    def decode_bytes(self, requests: int, kv_tokens: float) -> float:
        """Bytes that one step reads on all ranks."""
        each = request_bytes(self.shape, self.kv_width, round(kv_tokens / requests), self.tp)
        return self.shape.step_weight_bytes(requests) + requests * each

    def decode_s(self, requests: int, kv_tokens: float) -> float:
        """One decode step of `requests` requests whose contexts are `kv_tokens` long in all."""
        if requests <= 0:
            return 0.0
        weights, context = self.shape.weights, round(kv_tokens / requests)
        attention = sum(group.layers * group.pair_flops * group.pairs(1, context) for group in self.shape.groups)
        flops = requests * (2 * (weights.layers_active + weights.head) + attention)
        return max(self.decode_bytes(requests, kv_tokens) / self.bytes_s, flops / self.flops_s)


Speed: TypeAlias = EngineTimes | Roofline
"""Both know `prefill_s(tokens, context)` and `decode_s(requests, kv_tokens)`."""
