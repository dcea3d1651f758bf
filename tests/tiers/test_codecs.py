"""What goes through a codec comes back as it was, or as close as a lossy one says; what was tampered with does not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import ConfigError
from headwater.ports import Bytes
from headwater.tiers.aes import NONCE_BYTES, TAG_BYTES, Aes
from headwater.tiers.codec import Codec, Plain
from headwater.tiers.codecs import NAMES, make_codec
from headwater.tiers.elements import element_bytes, element_type
from headwater.tiers.header import EXTRA_BYTES, Encoded, Header, payload_checksum, read_header, write_header
from headwater.tiers.int8 import Int8
from headwater.tiers.key_ring import KeyRing
from headwater.tiers.zstd import Zstd
from headwater.types import PAGE_BYTES, ChunkKey, Identity, KVGroup, KVLayout, Namespace, Origin
from tests.kernels.codecs import INFINITY, WORDS, floats, half_step
from tests.tiers.keys import Keys

zstandard = pytest.importorskip("zstandard")
pytest.importorskip("cryptography")

POISON = 0x5A
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1, "opaque": 2}


def identity(
    *,
    kv_dtype: str = "auto:bfloat16",
    lossy: str = "",
    tenant: str = "",
    groups: tuple[KVGroup, ...] = (KVGroup(16, 2 * 16 * 24 * 2, (3, 2), channels=24),),
    chunk_tokens: int = 80,
    group: int = 0,
    key: bytes = b"k" * 16,
) -> Identity:
    """A chunk of five blocks (so that the last span is short), two shards, in each block a run of K and one of V."""
    layout = KVLayout(chunk_tokens, groups)
    assert layout.problem() is None
    namespace = Namespace("model", kv_dtype, "layout", layout.fingerprint(), tenant=tenant, lossy=lossy)
    return Identity(Origin.of(namespace, layout), group, ChunkKey(key))


def payload_of(it: Identity, seed: int = 1) -> Bytes:
    """Numbers of one order of magnitude, each channel with its own, as the namespace's elements; noise in the gaps."""
    element = element_type(it.origin.namespace.kv_dtype)
    words = WORDS.get(element, np.uint8)
    random = np.random.default_rng(seed)
    count = it.length_bytes // np.dtype(words).itemsize
    if words is np.uint8:
        return random.integers(0, 256, count, np.uint8)
    exponent = np.resize(random.integers(-6, 7, 24), count)
    numbers = (random.standard_normal(count) * np.exp2(exponent)).astype(np.float32)
    if element == "float16":
        return numbers.astype(np.float16).view(np.uint8)
    return (
        (numbers.view(np.uint32) >> 16).astype(words).view(np.uint8) if words is np.uint16 else numbers.view(np.uint8)
    )


def stored_form(codec: Codec, it: Identity, payload: Bytes, shift: int = 0) -> tuple[Encoded, Bytes]:
    """What a tier would keep: also through a header page, which fills `extra` up with zeros."""
    most = codec.stored_bytes(it)
    room = np.full(most + shift + 64, POISON, np.uint8)
    before = payload.copy()
    encoded = codec.encode(it, payload, room[shift : shift + most])
    assert encoded is not None and encoded.codec == codec.name
    assert np.array_equal(payload, before), "the payload is the caller's"
    assert (room[:shift] == POISON).all() and (room[shift + most :] == POISON).all()
    assert encoded.stored_bytes == most if codec.fixed else encoded.stored_bytes <= most
    stored = room[shift : shift + encoded.stored_bytes]
    page = bytearray(PAGE_BYTES)
    write_header(memoryview(page), it, encoded, payload_checksum(stored))
    header = read_header(page)
    assert isinstance(header, Header) and len(header.encoded.extra) == EXTRA_BYTES
    return header.encoded, stored


def decoded(codec: Codec, it: Identity, encoded: Encoded, stored: Bytes) -> Bytes | None:
    """The payload that comes back; None where the codec says no. Nothing around it may change."""
    room = np.full(it.length_bytes + 128, POISON, np.uint8)
    stored = stored.copy()
    stored.flags.writeable = False
    whole = codec.decode(it, encoded, stored, room[64 : 64 + it.length_bytes])
    assert (room[:64] == POISON).all() and (room[-64:] == POISON).all()
    return room[64:-64] if whole else None


def parts(it: Identity) -> list[slice]:
    layout = it.origin.layout
    starts = [layout.part_offset(it.group, shard) for shard in range(layout.shards)]
    return [slice(at, at + layout.part_bytes(it.group, shard)) for shard, at in enumerate(starts)]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    file = Keys(tmp_path_factory.mktemp("keys") / "keys.toml")
    file.write(("all", "*"), ("new", "alice"), ("old", "alice"), ("bobs", "bob"))
    return file


@pytest.fixture(scope="module")
def codec_named(keys: Keys) -> Callable[[str], Codec]:
    made = {name: make_codec(name, keys.path if "aes" in name else None) for name in NAMES}
    return made.__getitem__


each = pytest.mark.parametrize("name", NAMES)
encrypting = pytest.mark.parametrize("name", [name for name in NAMES if "aes" in name])

groups = st.builds(
    lambda tokens, runs, channels, size, layers: KVGroup(
        tokens, tokens * runs * channels * size, layers, channels=channels
    ),
    st.sampled_from([1, 8, 16, 128]),
    st.integers(1, 3),
    st.integers(1, 40),
    st.sampled_from([1, 2, 4]),
    st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple),
)


@each
@given(
    group=groups,
    blocks=st.integers(1, 5),
    dtype=st.sampled_from(["auto:bfloat16", "auto:float16", "float32", "fp8_e4m3:uint8", "auto:int3"]),
    lossy=st.sampled_from(["", "int8", "int4"]),
    seed=st.integers(0, 2**32),
    shift=st.integers(0, 9),
)
def test_there_and_back(
    name: str, group: KVGroup, blocks: int, dtype: str, lossy: str, seed: int, shift: int, codec_named
) -> None:
    """Exact, except through int8 in a namespace that says so."""
    it = identity(kv_dtype=dtype, lossy=lossy, groups=(group,), chunk_tokens=blocks * group.block_tokens)
    payload = payload_of(it, seed)
    codec = codec_named(name)
    encoded, stored = stored_form(codec, it, payload, shift)
    back = decoded(codec, it, encoded, stored)
    assert back is not None
    if name.startswith("int8") and lossy == "int8":
        element = element_type(dtype)
        for part in parts(it):
            assert_close(payload[part], back[part], element)
    else:
        assert np.array_equal(back, payload)


def assert_close(payload: Bytes, back: Bytes, element: str) -> None:
    if element not in WORDS or len(payload) % np.dtype(WORDS[element]).itemsize:
        assert np.array_equal(back, payload), "what is no whole number of elements is kept as it is"
        return
    exact, near = (floats(it.view(WORDS[element]), element) for it in (payload, back))
    assert np.abs(near - exact).max() <= np.abs(exact).max() / 127


# ---- zstd ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kv_dtype", "name", "size"),
    [
        ("auto:bfloat16", "bfloat16", 2),
        ("auto:torch.float16", "float16", 2),
        ("bfloat16", "bfloat16", 2),
        ("bfloat16:float32", "bfloat16", 2),
        ("AUTO:FLOAT32", "float32", 4),
        ("half", "float16", 2),
        ("fp8:bfloat16", "fp8", 1),
        ("fp8_e5m2:uint8", "fp8_e5m2", 1),
        ("auto:float8_e4m3fn", "float8_e4m3fn", 1),
        ("auto:float64", "float64", 8),
        ("auto", "auto", None),
        ("mixed", "mixed", None),
        ("", "", None),
    ],
)
def test_element_types(kv_dtype: str, name: str, size: int | None) -> None:
    assert (element_type(kv_dtype), element_bytes(kv_dtype)) == (name, size)


BIG = (KVGroup(16, 16 * 256 * 2, (8,), channels=256),)


def test_zstd_shrinks_floats_and_keeps_noise_as_it_is() -> None:
    """Half as much again as zstd alone."""
    codec = Zstd()
    it = identity(groups=BIG, chunk_tokens=64)
    encoded, _ = stored_form(codec, it, payload_of(it))
    alone = len(zstandard.compress(payload_of(it), level=1))
    assert it.length_bytes - encoded.stored_bytes > 1.5 * (it.length_bytes - alone) > 0
    noise = np.random.default_rng(2).integers(0, 256, it.length_bytes, np.uint8)
    encoded, stored = stored_form(codec, it, noise)
    assert encoded.stored_bytes == codec.stored_bytes(it) == it.length_bytes + 24
    back = decoded(codec, it, encoded, stored)
    assert back is not None and np.array_equal(back, noise)


def test_a_chunk_of_zeros_is_stored_in_almost_nothing() -> None:
    codec, it = Zstd(), identity(groups=BIG, chunk_tokens=64)
    encoded, stored = stored_form(codec, it, np.zeros(it.length_bytes, np.uint8))
    assert encoded.stored_bytes < 200
    back = decoded(codec, it, encoded, stored)
    assert back is not None and not back.any()


def forged(planes: int, *frames: bytes) -> Bytes:
    table = bytes([planes, *bytes(7)]) + b"".join(len(frame).to_bytes(8, "little") for frame in frames)
    return np.frombuffer(table + b"".join(frames), np.uint8)


def wide_window(content: bytes) -> bytes:
    """A frame that is right, but asks for 128 MiB to decode it."""
    parameters = zstandard.ZstdCompressionParameters(window_log=27, write_content_size=0)
    writer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    frame = writer.compress(content) + writer.flush()
    assert zstandard.get_frame_parameters(frame).window_size == 1 << 27
    return frame


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(zstandard.ZstdCompressor(level=19).compress(bytes(1 << 28)), id="256 MiB of zeros"),
        pytest.param(wide_window(bytes(PAGE_BYTES)), id="a window of 128 MiB"),
        pytest.param(b"\x28\xb5\x2f\xfd\xe0" + (1 << 62).to_bytes(8, "little") + b"\1\0\0", id="claims 4 EiB"),
        pytest.param(zstandard.compress(bytes(PAGE_BYTES - 1)), id="a byte too few"),
        pytest.param(zstandard.compress(bytes(PAGE_BYTES + 1)), id="a byte too many"),
        pytest.param(b"", id="nothing"),
        pytest.param(b"\x28\xb5\x2f\xfd", id="a magic number"),
        pytest.param(bytes(100), id="no frame"),
    ],
)
def test_bombs_take_no_memory(frame: bytes) -> None:
    it = identity(kv_dtype="opaque", groups=(KVGroup(16, PAGE_BYTES, (1,)),), chunk_tokens=16)
    codec = Zstd()
    good, stored = stored_form(codec, it, np.zeros(PAGE_BYTES, np.uint8))
    assert decoded(codec, it, good, stored) is not None
    before = resident_peak_bytes()
    stored = forged(1, frame)
    assert decoded(codec, it, Encoded(len(stored), "zstd"), stored) is None
    assert resident_peak_bytes() - before < 32 << 20


def resident_peak_bytes() -> int:
    for line in Path("/proc/self/status").read_text("ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM")


@given(data=st.data())
def test_zstd_takes_no_table_but_its_own(data: st.DataObject) -> None:
    """Whatever the table says, decoding ends with a payload or with False."""
    codec, it = Zstd(), identity()
    encoded, stored = stored_form(codec, it, payload_of(it))
    changed = stored.copy()
    at = data.draw(st.sampled_from([0, *range(8, 24)]))
    changed[at] ^= data.draw(st.integers(1, 255))
    assert decoded(codec, it, encoded, changed) is None
    cut = data.draw(st.integers(0, len(stored) - 1))
    assert decoded(codec, it, encoded, stored[:cut]) is None


# ---- int8 ----------------------------------------------------------------------------------------------------


def test_int8_sizes_are_those_of_the_documented_layout() -> None:
    """Two shards of 3 and 2 layers, 5 blocks of 2 runs of 16 rows of 24 channels, spans of 4 blocks and of 1."""
    it = identity(lossy="int8")
    scales = [layers * 2 * 2 * 24 * 4 for layers in (3, 2)]
    data = [layers * 5 * 2 * 16 * 24 for layers in (3, 2)]
    lines = [-(-size // 64) * 64 for size in (scales[0], data[0], scales[1], data[1])]
    assert Int8().stored_bytes(it) == sum(lines)
    big = identity(lossy="int8", groups=BIG, chunk_tokens=256)
    assert big.length_bytes / Int8().stored_bytes(big) == 2 / (1 + 4 / 64)


@given(dtype=st.sampled_from(list(WORDS)), seed=st.integers(0, 2**32))
def test_int8_is_off_by_half_a_scale_in_each_channel(dtype: str, seed: int) -> None:
    size = BYTES[dtype]
    group = KVGroup(16, 2 * 16 * 24 * size, (3, 2), channels=24)
    it = identity(kv_dtype=dtype, lossy="int8", groups=(group,))
    payload = payload_of(it, seed)
    back = decoded(Int8(), it, *stored_form(Int8(), it, payload))
    assert back is not None
    for part, layers in zip(parts(it), (3, 2), strict=True):
        exact, near = (
            floats(side[part].view(WORDS[dtype]), dtype).reshape(layers, 5, 2, 16, 24) for side in (payload, back)
        )
        for span in (slice(0, 4), slice(4, 5)):
            scale = np.abs(exact[:, span]).max(axis=(1, 3), keepdims=True) / 127
            bound = scale / 2 * (1 + 2.0**-14) + half_step(np.abs(exact[:, span]) + scale, dtype)
            assert (np.abs(near - exact)[:, span] <= bound).all()
        assert not np.array_equal(exact, near)


def test_int8_stores_no_padding() -> None:
    """What lies between the shards' parts may be another tenant's: it is neither kept nor brought back."""
    it = identity(lossy="int8")
    payload, other = payload_of(it, 1), payload_of(it, 1)
    gap = slice(parts(it)[0].stop, parts(it)[1].start)
    assert gap.stop > gap.start
    other[gap] ^= 0xFF
    encoded, stored = stored_form(Int8(), it, payload)
    _, others = stored_form(Int8(), it, other, shift=3)
    assert np.array_equal(stored, others)
    back = decoded(Int8(), it, encoded, stored)
    assert back is not None and not back[gap].any() and not back[parts(it)[1].stop :].any()


def test_int8_leaves_nothing_of_an_earlier_chunk_in_a_buffer() -> None:
    """Scales and data that do not end on a line: what fills them up is zero, whatever was there."""
    it = identity(lossy="int8", groups=(KVGroup(1, 5 * 7 * 2, (1, 2), channels=7),), chunk_tokens=3)
    codec, stored = Int8(), []
    for poison in (0, POISON, 0xFF):
        target = np.full(codec.stored_bytes(it), poison, np.uint8)
        assert codec.encode(it, payload_of(it), target) is not None
        stored.append(target.tobytes())
    assert stored[0] == stored[1] == stored[2]


@pytest.mark.parametrize("name", ["int8", "int8+aes"])
@pytest.mark.parametrize("nan", [0, 1])
def test_int8_does_not_encode_what_is_not_finite(name: str, nan: int, codec_named) -> None:
    it = identity(lossy="int8")
    payload = payload_of(it)
    payload[parts(it)[1]].view(np.uint16)[-1] = INFINITY["bfloat16"] + nan
    codec = codec_named(name)
    assert codec.encode(it, payload, np.empty(codec.stored_bytes(it), np.uint8)) is None
    exact = identity()
    back = decoded(codec, exact, *stored_form(codec, exact, payload))
    assert back is not None and np.array_equal(back, payload)


@pytest.mark.parametrize(
    ("why", "changed"),
    [
        ("no channels", {"groups": (KVGroup(16, 1536, (3, 2)),)}),
        ("channels that do not fit", {"groups": (KVGroup(16, 1536, (3, 2), channels=25),)}),
        ("another codec", {"lossy": "int4"}),
        ("not lossy", {"lossy": ""}),
        ("fp8", {"kv_dtype": "fp8_e4m3:uint8"}),
        ("unknown elements", {"kv_dtype": "mixed"}),
    ],
)
def test_int8_passes_through_what_it_may_not_change(why: str, changed: dict) -> None:
    it = identity(**({"lossy": "int8"} | changed))
    payload = np.random.default_rng(1).integers(0, 256, it.length_bytes, np.uint8)
    encoded, stored = stored_form(Int8(), it, payload)
    assert np.array_equal(stored, payload)
    back = decoded(Int8(), it, encoded, stored)
    assert back is not None and np.array_equal(back, payload)


def test_int8_of_packed_rows_takes_the_block_as_one_run() -> None:
    """24 rows in blocks of 16 tokens: a packing that is not ours to understand."""
    it = identity(lossy="int8", groups=(KVGroup(16, 24 * 24 * 2, (1,), channels=24),), chunk_tokens=16)
    assert Int8().stored_bytes(it) == 24 * 4 + 32 + 24 * 24
    payload = payload_of(it)
    back = decoded(Int8(), it, *stored_form(Int8(), it, payload))
    assert back is not None
    assert_close(payload[parts(it)[0]], back[parts(it)[0]], "bfloat16")


# ---- every codec ---------------------------------------------------------------------------------------------


@each
def test_only_what_this_codec_wrote_is_taken(name: str, codec_named) -> None:
    """Ciphertext is as long as its plaintext: taken for a payload it would be a wrong one."""
    it = identity()
    codec, payload = codec_named(name), payload_of(it)
    for other in NAMES:
        encoded, stored = stored_form(codec_named(other), it, payload)
        assert (decoded(codec, it, encoded, stored) is not None) == (other == name)
        if other == name:
            assert decoded(codec, it, replace(encoded, codec="none" if name != "none" else "zstd"), stored) is None


@each
def test_slots_of_one_size_need_fixed_codecs(name: str, codec_named) -> None:
    codec = codec_named(name)
    assert codec.fixed == ("zstd" not in name)
    assert codec.in_place == (name == "none")
    it = identity(lossy="int8")
    sizes = {stored_form(codec, it, payload_of(it, seed))[0].stored_bytes for seed in range(3)}
    assert (sizes == {codec.stored_bytes(it)}) == codec.fixed


@each
def test_lengths_that_are_not_right_are_refused(name: str, codec_named) -> None:
    it, codec = identity(), codec_named(name)
    encoded, stored = stored_form(codec, it, payload_of(it))
    longer = np.concatenate([stored, stored[:1]])
    for wrong in (stored[:-1], longer, stored[:0]):
        assert decoded(codec, it, replace(encoded, stored_bytes=len(wrong)), wrong) is None


@each
def test_codecs_are_used_by_several_threads_at_once(name: str, codec_named) -> None:
    codec, wrong = codec_named(name), []
    it = identity(groups=BIG, chunk_tokens=64)
    gate = threading.Barrier(4)

    def work(seed: int) -> None:
        payload = payload_of(it, seed)
        gate.wait()
        for _ in range(5):
            back = decoded(codec, it, *stored_form(codec, it, payload))
            if back is None or not np.array_equal(back, payload):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ---- aes -----------------------------------------------------------------------------------------------------


@encrypting
@given(data=st.data())
def test_a_flipped_bit_anywhere_is_found(name: str, codec_named, data: st.DataObject) -> None:
    it, codec = identity(tenant="alice"), codec_named(name)
    encoded, stored = stored_form(codec, it, payload_of(it))
    assert decoded(codec, it, encoded, stored) is not None
    bit = 1 << data.draw(st.integers(0, 7))
    changed = stored.copy()
    changed[data.draw(st.integers(0, len(stored) - 1))] ^= bit
    assert decoded(codec, it, encoded, changed) is None
    extra = bytearray(encoded.extra)
    extra[data.draw(st.integers(0, EXTRA_BYTES - 1))] ^= bit
    assert decoded(codec, it, replace(encoded, extra=bytes(extra)), stored) is None
    key_id = bytearray(encoded.key_id.encode())
    key_id[data.draw(st.integers(0, len(key_id) - 1))] ^= bit & 0x7F or 1
    assert decoded(codec, it, replace(encoded, key_id=key_id.decode("ascii")), stored) is None


@encrypting
@pytest.mark.parametrize(
    ("what", "changed"),
    [
        ("another chunk", {"key": b"j" * 16}),
        ("another tenant with a key of its own", {"tenant": "bob"}),
        ("another tenant under the same secret", {"tenant": "dave"}),
        ("another KV dtype", {"kv_dtype": "auto:float16"}),
        ("another group", {"group": 1}),
    ],
)
def test_bytes_in_the_wrong_place_are_not_decrypted(name: str, what: str, changed: dict, codec_named) -> None:
    both = (KVGroup(16, 1536, (3, 2), channels=24),) * 2
    codec, mine = codec_named(name), identity(tenant="carol", groups=both)
    theirs = replace_identity(mine, **changed)
    assert theirs != mine and theirs.length_bytes == mine.length_bytes
    encoded, stored = stored_form(codec, mine, payload_of(mine))
    assert decoded(codec, mine, encoded, stored) is not None
    assert decoded(codec, theirs, encoded, stored) is None


def replace_identity(it: Identity, **changed) -> Identity:
    namespace, layout = it.origin.namespace, it.origin.layout
    return identity(
        **{
            "tenant": namespace.tenant,
            "kv_dtype": namespace.kv_dtype,
            "groups": layout.groups,
            "chunk_tokens": layout.chunk_tokens,
        }
        | changed
    )


@encrypting
def test_another_namespace_with_the_same_record_is_another_chunk(name: str, codec_named) -> None:
    """A salt is only in the root."""
    it, codec = identity(), codec_named(name)
    encoded, stored = stored_form(codec, it, payload_of(it))
    salted = replace(it, origin=replace(it.origin, root=b"s" * 32))
    assert decoded(codec, salted, encoded, stored) is None


@encrypting
def test_an_older_copy_of_a_chunk_is_the_same_chunk(name: str, codec_named) -> None:
    """A replay is harmless: equal keys have equal bytes. But a header of one copy does not fit the bytes of another."""
    it, codec = identity(), codec_named(name)
    older, older_stored = stored_form(codec, it, payload_of(it))
    newer, newer_stored = stored_form(codec, it, payload_of(it))
    assert older.extra != newer.extra and not np.array_equal(older_stored, newer_stored)
    back = decoded(codec, it, older, older_stored)
    assert back is not None and np.array_equal(back, payload_of(it))
    assert decoded(codec, it, newer, older_stored) is None


@encrypting
def test_nothing_of_the_payload_is_in_the_stored_bytes(name: str, codec_named) -> None:
    it, codec = identity(tenant="alice"), codec_named(name)
    payload = np.resize(np.frombuffer(b"a secret that must not be on any disk. ", np.uint8), it.length_bytes)
    encoded, stored = stored_form(codec, it, payload)
    kept = stored.tobytes() + encoded.extra
    assert not any(payload[at : at + 6].tobytes() in kept for at in range(64))
    counts = np.bincount(stored, minlength=256)
    assert len(stored) < 8192 or counts.max() < 2 * len(stored) / 256


@encrypting
def test_every_chunk_has_a_nonce_of_its_own(name: str, codec_named) -> None:
    it, codec = identity(), codec_named(name)
    extras = [stored_form(codec, it, payload_of(it))[0].extra for _ in range(50)]
    assert len({extra[:NONCE_BYTES] for extra in extras}) == 50
    assert not any(any(extra[NONCE_BYTES + TAG_BYTES :]) for extra in extras)


@encrypting
def test_keys_are_rotated_and_shredded(name: str, tmp_path: Path) -> None:
    file = Keys(tmp_path / "keys.toml")
    file.write(("2026-11", "alice"))
    codec = make_codec(name, file.path)
    assert isinstance(codec, Aes)
    it = identity(tenant="alice")
    old = stored_form(codec, it, payload_of(it))
    assert old[0].key_id == "2026-11"

    file.write(("2026-12", "alice"), ("2026-11", "alice"))
    codec.keys.reload()
    new = stored_form(codec, it, payload_of(it))
    assert new[0].key_id == "2026-12"
    assert decoded(codec, it, *old) is not None and decoded(codec, it, *new) is not None

    file.write(("2026-12", "alice"))
    codec.keys.reload()
    assert decoded(codec, it, *old) is None and decoded(codec, it, *new) is not None

    file.forget("2026-12")
    file.write(("2026-12", "alice"))  # the same name, another secret
    codec.keys.reload()
    assert decoded(codec, it, *new) is None


@encrypting
def test_the_same_secret_by_another_name_is_another_key(name: str, tmp_path: Path) -> None:
    file = Keys(tmp_path / "keys.toml")
    text = '[[key]]\nid = "{}"\ntenant = "*"\nsecret = "' + file.secret("any") + '"\n'
    file.text(text.format("b") + text.format("a"))
    codec, it = make_codec(name, file.path), identity()
    encoded, stored = stored_form(codec, it, payload_of(it))
    assert decoded(codec, it, encoded, stored) is not None
    assert decoded(codec, it, replace(encoded, key_id="a"), stored) is None


@encrypting
def test_a_tenant_without_a_key_is_not_stored(name: str, tmp_path: Path) -> None:
    file = Keys(tmp_path / "keys.toml")
    file.write(("bobs", "bob"))
    codec = make_codec(name, file.path)
    for tenant, stored in (("bob", True), ("alice", False), ("", False), ("*", False)):
        it = identity(tenant=tenant)
        target = np.full(codec.stored_bytes(it), POISON, np.uint8)
        assert (codec.encode(it, payload_of(it), target) is not None) == stored, tenant
        assert stored or (target == POISON).all()


# ---- names ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("zst", "zstd"), ("aes+zstd", "zstd+aes"), ("AES", "aes"), ("int8+zstd", "int8"), ("", "none")],
)
def test_unknown_names_are_refused(name: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=rf"codec={name.replace('+', '.')}: unknown.*{nearest.replace('+', '.')}"):
        make_codec(name, None)


def test_what_encrypts_needs_keys() -> None:
    with pytest.raises(ConfigError, match=r"zstd\+aes encrypts and needs keys"):
        make_codec("zstd+aes", None)


@pytest.mark.parametrize(
    ("name", "package"), [("zstd", "zstandard"), ("aes", "cryptography"), ("zstd+aes", "zstandard")]
)
def test_a_missing_package_is_named(name: str, package: str, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for module in [it for it in sys.modules if it.split(".")[0] == package]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"{package}; run: pip install 'headwater\[codecs\]'"):
        make_codec(name, keys.path)


def test_names_fit_the_header() -> None:
    assert all(len(name.encode("ascii")) <= 16 for name in NAMES)
    assert isinstance(make_codec("none", None), Plain)


def test_keys_of_a_ring_can_be_shared(keys: Keys) -> None:
    """Two tiers with one ring: reloaded once, for both."""
    ring = KeyRing.load(keys.path)
    assert Aes(Plain(), ring).keys is Aes(Zstd(), ring).keys
