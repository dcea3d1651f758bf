"""The hit curve against caches that are played through, and by hand."""

import random
from collections import OrderedDict

import pytest

from headwater.errors import ConfigError
from headwater.plan import sizes
from headwater.plan.sizes import hit_curve
from headwater.traces.model import Trace, TraceRequest
from tests.conftest import seed_of


def trace(*requests: tuple[int, tuple[int, ...]]) -> Trace:
    """Of requests with a length and blocks of 10 tokens."""
    return Trace(
        "t", 10, tuple(TraceRequest(float(i), tokens, 1, blocks) for i, (tokens, blocks) in enumerate(requests))
    )


def test_by_hand() -> None:
    # Newest first before the third request: 4, 1, 2, 3. Its blocks need 2, 3 and 4 of them; the last one is half full.
    curve = hit_curve(trace((30, (1, 2, 3)), (10, (4,)), (25, (1, 2, 3))))
    assert (curve.blocks, curve.hit_tokens, curve.input_tokens) == ((2, 3, 4), (10, 20, 25), 65)
    assert [curve.rate(blocks) for blocks in (0, 1, 2, 3, 4, 99)] == [0, 0, 10 / 65, 20 / 65, 25 / 65, 25 / 65]
    assert curve.most == 25 / 65
    assert [curve.blocks_for(rate) for rate in (0.0, 0.01, 10 / 65, 0.2, 25 / 65)] == [0, 2, 2, 3, 4]
    assert curve.blocks_for(0.5) is None


def test_nothing_is_ever_used_again() -> None:
    curve = hit_curve(trace((10, (1,)), (10, (2,))))
    assert (curve.most, curve.rate(9), curve.blocks_for(0.1)) == (0.0, 0.0, None)


def test_a_prefix_ends_where_it_is_new() -> None:
    # Block 2 was met, but after another block: what follows a new block is another block, whatever its number.
    assert hit_curve(trace((20, (1, 2)), (20, (3, 2)))).most == 0


def test_a_trace_without_blocks() -> None:
    with pytest.raises(ConfigError, match="--trace t: it has lengths and arrivals but no block hashes"):
        hit_curve(trace((30, ()), (10, ())))


def played(of: Trace, blocks: int) -> int:
    """Hit tokens of one LRU cache of so many blocks that is played through."""
    cache: OrderedDict[int, None] = OrderedDict()
    hit = 0
    for request in of.requests:
        left = request.input_tokens
        for block in request.blocks:
            if block not in cache:
                break
            hit += min(left, of.block_tokens)
            left -= of.block_tokens
        for block in reversed(request.blocks):
            cache.pop(block, None)
            cache[block] = None
            if len(cache) > blocks:
                cache.popitem(last=False)
    return hit


def test_as_every_cache_that_is_played_through(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "BUCKET", 8)
    rng = random.Random(seed_of(pytestconfig))
    paths: list[tuple[int, ...]] = [()]
    requests = []
    for _ in range(80):
        path = rng.choice(paths[-12:])
        path = path[: rng.randint(0, len(path))]
        for _ in range(rng.randint(1, 3)):
            path = (*path, len(paths) * 10 + len(path))
        paths.append(path)
        requests.append((len(path) * 10 - rng.randint(0, 9), path))
    of = trace(*requests)
    curve = hit_curve(of)
    assert curve.most > 0.1
    for blocks in range(1, 120):
        assert curve.rate(blocks) * curve.input_tokens == pytest.approx(played(of, blocks)), f"{blocks} blocks"
