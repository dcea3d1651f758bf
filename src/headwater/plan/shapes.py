"""The shape of a model: its layers by kind, what each keeps of a token or a request, and its weights."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class LayerKind(StrEnum):
    """What a layer remembers of a request."""

    FULL = "full attention"
    LATENT = "latent attention"
    WINDOW = "sliding window"
    CHUNKED = "chunked attention"
    STATE = "recurrent state"


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that remember alike.

    `token_elements` are what one layer keeps of one token, all heads together: 2 * kv_heads * head_dim, or for a latent
    kv_lora_rank + qk_rope_head_dim, which all heads share. `state_elements` are what one layer keeps of a request,
    however long. `pair_flops` is one query token against one earlier token in one layer, all heads: two operations for
    each element of q.k and of p.v.
    """

    kind: LayerKind
    layers: int
    token_elements: int = 0
    kv_heads: int = 1
    window_tokens: int = 0
    """The window of WINDOW, the chunk of CHUNKED; 0 otherwise."""
    state_elements: int = 0
    pair_flops: int = 0

    def kept_tokens(self, tokens: int) -> int:
        """How many tokens of a request of `tokens` are kept at the most."""
        return min(tokens, self.window_tokens) if self.window_tokens else tokens

    def pairs(self, tokens: int, context: int = 0) -> int:
        """(query, key) pairs of `tokens` new tokens after `context`: token number i sees itself and all that its kind
        lets it see before."""
        if self.kind is LayerKind.STATE:
            return 0
        return self._pairs_up_to(context + tokens) - self._pairs_up_to(context)

    def _pairs_up_to(self, tokens: int) -> int:
        size = self.window_tokens
        if self.kind is LayerKind.CHUNKED:
            whole, rest = divmod(tokens, size)
            return whole * _triangle(size) + _triangle(rest)
        if self.kind is LayerKind.WINDOW and tokens > size:
            return _triangle(size) + (tokens - size) * size
        return _triangle(tokens)


def _triangle(count: int) -> int:
    return count * (count + 1) // 2


@dataclass(frozen=True, slots=True)
class Weights:
    """How many parameters a model has, by what a token does with them; biases are left out, norms counted.

    `embedding` is looked up, `head` makes the logits (the same table where they are tied), `dense` is used by every
    token, and of `routed` each token uses `chosen` of `experts` parts.
    """

    embedding: int
    head: int
    tied: bool
    dense: int
    routed: int = 0
    experts: int = 0
    chosen: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.embedding + (0 if self.tied else self.head) + self.dense + self.routed

    @property
    def layers_active(self) -> int:
        """Those of the layers that one token is multiplied with."""
        return self.dense + (self.routed * self.chosen // self.experts if self.experts else 0)

    @property
    def active(self) -> int:
        """As models are advertised: with the tables."""
        return self.layers_active + self.embedding + (0 if self.tied else self.head)

    def met_experts(self, tokens: int) -> float:
        """The share of the routed experts that a step of `tokens` tokens meets, each token choosing at random:
        1 - (1 - chosen / experts) ** tokens."""
        return 1 - (1 - self.chosen / self.experts) ** tokens if self.experts else 0.0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Everything about a model that the plan needs. Widths are bytes of an element."""

    name: str
    groups: tuple[LayerGroup, ...]
    weights: Weights
    hidden_size: int
    kv_width: float
    """Of K, V and state, as the model's own dtype says."""
    dense_width: float
    """Of the weights but the routed experts."""
    routed_width: float
    tokens_max: int
    """The longest context; 0 where the model does not say."""

    @property
    def layers(self) -> int:
        """All layers."""
        return sum(it.layers for it in self.groups)

    @property
    def weight_bytes(self) -> int:
        """All weights."""
        rest = self.weights.total - self.weights.routed
        return round(rest * self.dense_width + self.weights.routed * self.routed_width)

    def step_weight_bytes(self, tokens: int) -> float:
        """The weights that a step of `tokens` tokens reads: no embedding, and of the experts those that are met."""
        it = self.weights
        return (it.dense + it.head) * self.dense_width + it.routed * self.routed_width * it.met_experts(tokens)
