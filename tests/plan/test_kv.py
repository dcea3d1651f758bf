"""Bytes of KV, worked out by hand."""

from dataclasses import replace

import pytest

from headwater.errors import ConfigError
from headwater.plan.known import known_shape
from headwater.plan.kv import (
    check_tp,
    chunk_bytes,
    growing_bytes,
    layout,
    prefix_bytes,
    request_bytes,
    state_bytes,
    token_bytes,
)
from headwater.plan.links import WAYS, WayIn, parse_way
from tests.plan.shapes import SMALL


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("llama-3.1-8b", 32 * 2 * 8 * 128 * 2),
        ("llama-3.1-70b", 80 * 2 * 8 * 128 * 2),  # 320 KiB, as Mooncake's paper says
        ("deepseek-v3", 61 * (512 + 64) * 2),
        ("gpt-oss-120b", 36 * 2 * 8 * 64 * 2),
        ("qwen3-next-80b-a3b", 12 * 2 * 2 * 256 * 2),
    ],
)
def test_bytes_of_a_token(name: str, size: int) -> None:
    assert token_bytes(known_shape(name), 2.0) == size
    assert token_bytes(known_shape(name), 1.0) == size / 2


def test_windows_stop_growing_and_states_never_grow() -> None:
    gpt = known_shape("gpt-oss-120b")
    # A layer keeps 2 * 8 * 64 * 2 = 2,048 bytes of a token: 18 layers all 1,000 tokens, 18 layers the last 128.
    assert request_bytes(gpt, 2.0, 1000) == 18 * 2048 * 1000 + 18 * 2048 * 128
    assert request_bytes(gpt, 2.0, 100) == 36 * 2048 * 100
    assert growing_bytes(gpt, 2.0) == 18 * 2048
    qwen = known_shape("qwen3-next-80b-a3b")
    assert state_bytes(qwen, 2.0) == 36 * 548_864 * 2
    assert request_bytes(qwen, 2.0, 10) == 10 * 24_576 + 39_518_208


def test_ranks_copy_what_they_cannot_share() -> None:
    llama, latent = known_shape("llama-3.1-70b"), known_shape("deepseek-v3")
    assert request_bytes(llama, 2.0, 100, tp=8) == 100 * 327_680
    assert request_bytes(llama, 2.0, 100, tp=16) == 2 * 100 * 327_680  # 8 heads, each on two ranks
    assert request_bytes(latent, 2.0, 100, tp=8) == 8 * 100 * 70_272  # the latent is on every rank
    # Two KV heads on four ranks: the attention twice, the state, which has 32 heads, once.
    assert request_bytes(known_shape("qwen3-next-80b-a3b"), 2.0, 10, tp=4) == 2 * 10 * 24_576 + 39_518_208


def test_ranks_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match=r"--tp 3: llama-3\.1-70b has 8 KV heads, which 3 ranks cannot share"):
        check_tp(known_shape("llama-3.1-70b"), 3)
    check_tp(known_shape("deepseek-v3"), 3)


def test_a_chunk_is_slots_of_whole_pages() -> None:
    # One rank: 2 layers * 1 block * 16 tokens * 16 elements * 2 bytes = 1,024, in a page of 4,096.
    assert chunk_bytes(layout(SMALL, 2.0, 16, 16, 1)) == 4096
    # Two ranks copy the one head: each 1,024 in a page of its own.
    assert chunk_bytes(layout(SMALL, 2.0, 16, 16, 2)) == 2 * 4096
    # Llama-3.1-70B: 256 * 320 KiB = 80 MiB, however many of its 8 heads a rank has.
    for tp in (1, 2, 8):
        assert chunk_bytes(layout(known_shape("llama-3.1-70b"), 2.0, 256, 16, tp)) == 80 << 20
    # A latent is stored once: 61 * 256 * 576 * 2 = 17,989,632 bytes, 4,392 pages.
    assert chunk_bytes(layout(known_shape("deepseek-v3"), 2.0, 256, 16, 8)) == 17_989_632


def test_a_chunk_is_whole_blocks() -> None:
    with pytest.raises(ConfigError, match="--chunk-tokens 100: not whole blocks of 16 tokens"):
        layout(SMALL, 2.0, 100, 16, 1)


def test_of_a_prefix_only_what_is_read_moves() -> None:
    # gpt-oss-120b, chunks of 256: a slot of 18 layers * 256 * 1,024 * 2 = 9,437,184 bytes for either kind. Of 4 chunks
    # all go for full attention, and the last one, which has the last 128 tokens, for the window.
    assert prefix_bytes(layout(known_shape("gpt-oss-120b"), 2.0, 256, 16, 1), 1024) == (4 + 1) * 9_437_184
    # Qwen3-Next: 12 * 256 * 1,024 * 2 = 6,291,456 a chunk, and one state.
    assert prefix_bytes(layout(known_shape("qwen3-next-80b-a3b"), 2.0, 256, 16, 1), 1024) == 4 * 6_291_456 + 39_518_208
    assert prefix_bytes(layout(known_shape("llama-3.1-70b"), 2.0, 256, 16, 1), 255) == 0


def test_the_well_known_transfer() -> None:
    # 4,096 tokens * 327,680 bytes = 1.25 GiB; at 50 GB/s 1,342,177,280 / 50e9 = 26.84 ms.
    size = prefix_bytes(layout(known_shape("llama-3.1-70b"), 2.0, 256, 16, 4), 4096)
    assert size == 1.25 * 2**30
    assert parse_way("nic=50").seconds(size) == pytest.approx(0.02684354560)


def test_seconds_of_a_link() -> None:
    one, each = WayIn("one", "", 2e9, 1e9, 0.5), WayIn("each", "", 2e9, 1e9, 0.5, each_gpu=True)
    assert one.seconds(3e9) == one.seconds(3e9, tp=4) == 0.5 + 3
    assert each.seconds(3e9, tp=4) == 0.5 + 0.75
    assert parse_way("wan=1.25,20000") == WayIn("wan", "as given", 1.25e9, 1.25e9, 0.02)
    assert parse_way("pcie5") is WAYS["pcie5"]
    assert all(it.effective_bytes_s < it.nominal_bytes_s for it in WAYS.values())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rose-100g", "--link 'rose-100g' is not known, the nearest is 'roce-100g'"),
        ("a=x", "--link 'a=x': 'x' is not a number"),
        ("a=1,x", "'x' is not a number"),
        ("a=0", "GB/s above 0"),
        ("a=-1", "GB/s above 0"),
        ("a=nan", "GB/s above 0"),
        ("a=1,-5", "microseconds up to"),
        ("=5", "needs a name"),
    ],
)
def test_links_that_cannot_be(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_way(text)


def test_a_width_of_half_a_page_is_whole_bytes() -> None:
    assert chunk_bytes(layout(replace(SMALL), 1.0, 256, 16, 1)) == 8192  # 2 * 16 * 16 * 16 * 1
