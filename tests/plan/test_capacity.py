"""What fits, worked out by hand."""

from dataclasses import replace

import pytest

from headwater.errors import ConfigError
from headwater.plan.capacity import Fit, kv_room_bytes, least_tp, requests_that_fit
from headwater.plan.gpus import GPUS, Gpu, parse_gpu
from headwater.plan.known import known_shape
from tests.plan.shapes import SMALL

GIB = 1 << 30
GPU = Gpu("g", 100 * GIB, 1e12, 1e12)


def test_room_is_what_weights_and_activations_leave() -> None:
    # 2 * (100 * 0.9 - 5) - 50 = 120
    assert kv_room_bytes(GPU, 2, 50 * GIB, 0.9, 5 * GIB) == 120 * GIB
    assert kv_room_bytes(GPU, 1, 86 * GIB, 0.9, 5 * GIB) == 0


def test_whole_requests_in_each_tier() -> None:
    # DEVICE 120 // 40 = 3, HOST 512 // 41 = 12, DISK 4096 // 41 = 99
    found = requests_that_fit(120, 40, 41, 512.0, 4096.0)
    assert found == Fit(3, 12, 99)
    assert found.sessions == 114


def test_the_least_gpus() -> None:
    # Llama-3.1-70B on H100, weights 131.4 GiB, an H100 gives 79.65 * 0.9 - 2 = 69.7: two hold the weights and 7.9 GiB,
    # which is 25,960 tokens of 320 KiB; a request of 131,072 tokens has 40 GiB and needs four.
    shape, gpu = known_shape("llama-3.1-70b"), GPUS["h100"]
    least = [
        least_tp(shape, gpu, 2.0, tokens, shape.weight_bytes, 0.9, 2 * GIB) for tokens in (25_000, 26_500, 131_072)
    ]
    assert least == [2, 4, 4]
    assert least_tp(shape, replace(gpu, memory_bytes=4 * GIB), 2.0, 1000, shape.weight_bytes, 0.9, 2 * GIB) is None


def test_gpus_that_cannot_share_are_passed_over() -> None:
    three = replace(SMALL, groups=(replace(SMALL.groups[0], kv_heads=3, token_elements=48),))
    tight = replace(GPU, memory_bytes=2500)
    # One GPU: 2,500 - 2,200 of weights is too little for 3 tokens of 192 bytes; two cannot share three heads.
    assert least_tp(SMALL, tight, 2.0, 5, SMALL.weight_bytes, 1.0, 0) == 2
    assert least_tp(three, tight, 2.0, 3, three.weight_bytes, 1.0, 0) is None


def test_gpus_of_ones_own() -> None:
    assert parse_gpu("H100") is GPUS["h100"]
    assert parse_gpu("own=48GiB,181,0.96") == Gpu("own", 48 * GIB, 181e12, 0.96e12)


@pytest.mark.parametrize(
    "text", ["own=48GiB,181", "own=48GiB,x,1", "own=-1,1,1", "own=48GiB,0,1", "own=48GiB,1,nan", "=1GiB,1,1"]
)
def test_gpus_that_cannot_be(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--gpu '{text}'"):
        parse_gpu(text)


def test_an_unknown_gpu() -> None:
    with pytest.raises(ConfigError, match="--gpu 'h10' is not known, the nearest is 'h100'"):
        parse_gpu("h10")
