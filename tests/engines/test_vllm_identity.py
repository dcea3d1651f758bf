"""Whose KV is whose: everything that changes KV bytes keeps engines and requests apart, and nothing else does."""

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headwater.engines.vllm import identity
from headwater.errors import ConfigError
from tests.engines.harness import Engine, Shape
from tests.engines.oracle import continuation
from tests.engines.served import CHUNK, CONNECTOR, DENSE, MODES, decider
from tests.engines.shape import make_config
from tests.engines.vllm_names import LoRARequest
from tests.engines.workload import words

PROMPT = words(100, 11)


def adapter(directory: Path, name: str, weights: bytes, number: int = 1) -> LoRARequest:
    """A LoRA adapter with these weights on disk, in a directory of the adapter's name."""
    folder = directory / name
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return LoRARequest(name, number, str(folder))


def ask(engine: Engine, name: str, prompt: list[int] = PROMPT, **kind: Any) -> int:
    """Run one request, which must come out right; how many tokens were loaded for it."""
    told = {key: value for key, value in kind.items() if key != "lora"}
    engine.forget()
    engine.add(name, prompt, max_tokens=3, **kind)
    engine.run()
    assert engine.outputs[name] == continuation(prompt, 3, **told)
    return engine.loaded_tokens(name)


# ---- requests ------------------------------------------------------------------------------------------


@MODES
def test_salts_keep_tenants_of_one_engine_apart(served, mode) -> None:
    first, second = (served.engine(DENSE, mode) for _ in range(2))
    for salt in (None, "one", "two"):
        ask(first, f"{salt}", salt=salt)
    for salt, loaded in (("three", 0), ("one", 96), ("two", 96), (None, 96), ("One", 0), ("one ", 0)):
        assert ask(second, f"{salt}", salt=salt) == loaded


@MODES
def test_adapters_are_told_apart_by_their_weights(served, tmp_path, mode) -> None:
    first, second = (served.engine(DENSE, mode) for _ in range(2))
    chat, code = adapter(tmp_path, "chat", b"chat v1"), adapter(tmp_path, "code", b"code v1", 2)
    ask(first, "plain")
    ask(first, "chat", adapter="chat v1", lora=chat)
    assert ask(second, "code", adapter="code v1", lora=code) == 0
    assert ask(second, "chat", adapter="chat v1", lora=chat) == 96
    assert ask(second, "plain") == 96
    # The same weights elsewhere and under another name are the same adapter.
    moved = adapter(tmp_path / "moved", "renamed", b"chat v1", 7)
    assert ask(second, "moved", adapter="chat v1", lora=moved) == 96


@MODES
def test_a_new_version_of_an_adapter_is_another_adapter(served, tmp_path, mode) -> None:
    first, second = (served.engine(DENSE, mode) for _ in range(2))
    ask(first, "old", adapter="v1", lora=adapter(tmp_path, "chat", b"version 1"))
    new = adapter(tmp_path, "chat", b"version 2")
    assert ask(second, "new", adapter="v2", lora=new) == 0
    # An engine that has the old weights loaded under this very id: nobody knows which it uses, so it shares nothing.
    assert ask(first, "unknown", adapter="v1", lora=new) == 0
    assert ask(second, "new again", adapter="v2", lora=new) == 96
    # Loaded again under a new id, it is known again.
    again = LoRARequest("chat", 2, new.lora_path)
    assert ask(first, "known", adapter="v2", lora=again) == 96


def test_adapters_that_nobody_can_identify_are_not_cached(served, tmp_path) -> None:
    engine = served.engine()
    inplace = adapter(tmp_path, "inplace", b"anything")
    inplace.load_inplace = True
    unknown = LoRARequest("unknown", 3, "/adapters/not-there")
    for name, lora in (("inplace", inplace), ("unknown", unknown)):
        ask(engine, name, adapter=name, lora=lora)
        assert ask(engine, f"{name} again", adapter=name, lora=lora) == 0
    decider(engine)
    assert (served.space.stored_chunks, served.space.lookup_tokens) == (0, 0)


def test_the_stamp_notices_every_way_to_change_a_file(tmp_path) -> None:
    adapters = identity.Adapters()
    lora = adapter(tmp_path, "chat", b"12345678")
    weights = Path(lora.lora_path) / "adapter_model.safetensors"
    known, before = adapters.content_id(lora), weights.stat()
    assert known
    assert adapters.content_id(lora) == known
    # Another file of the same name, size and time, as rsync -t makes it.
    new = weights.with_name("new")
    new.write_bytes(b"87654321")
    os.utime(new, ns=(before.st_atime_ns, before.st_mtime_ns))
    new.rename(weights)
    assert adapters.content_id(lora) is None
    other = identity.Adapters().content_id(lora)
    assert other not in (None, known)
    weights.unlink()
    assert adapters.content_id(lora) is None
    assert adapters.content_id(None) == ""


@MODES
def test_a_hundred_images_behind_the_same_placeholders(served, mode) -> None:
    first, second = (served.engine(DENSE, mode, save=save) for save in (True, False))
    prompt = words(70, 5)
    for n in range(50):
        assert ask(first, f"{n}", prompt, media=[(f"image-{n}", 10, 30)]) == 0, n
    for n in range(100):
        assert ask(second, f"{n}", prompt, media=[(f"image-{n}", 10, 30)]) == (64 if n < 50 else 0), n
    assert served.space.stored_chunks == 50 * 2


@MODES
def test_the_place_of_an_image_matters_from_its_first_chunk_on(served, mode) -> None:
    first, second = (served.engine(DENSE, mode) for _ in range(2))
    text = words(3 * CHUNK + 4, 6)
    ask(first, "base", text, media=[("cat", 40, 20)])
    for media, loaded in (
        ([("cat", 40, 20)], 96),
        ([("dog", 40, 20)], 32),
        ([("cat", 41, 20)], 32),
        ([("cat", 40, 20), ("cat", 70, 20)], 64),
        ([], 32),
    ):
        assert ask(second, f"{media}", text, media=media) == loaded, media


# ---- engines -------------------------------------------------------------------------------------------

BASE: dict[str, Any] = {"shape": Shape(block_tokens=16, heads=2)}
OTHERS: dict[str, dict[str, Any]] = {
    "other weights": {"fingerprint": "other-model"},
    "other tenant": {"tenant": "them"},
    "KV of another type of the same size": {"shape": Shape(heads=2, dtype="int32")},
    "other order inside a block": {"shape": Shape(heads=2, order="LBNHC")},
    "larger blocks": {"shape": Shape(block_tokens=32, heads=2)},
    "larger chunks of fewer layers": {"shape": Shape(heads=2, layers=1), "chunk_tokens": 2 * CHUNK},
    "two ranks with half the heads": {"shape": Shape(heads=1, tp=2)},
    "two stages with half the layers": {"shape": Shape(heads=2, pp=2)},
    "half the heads twice the size": {"shape": Shape(heads=1, head_size=8), "fingerprint": "other-heads"},
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_engines_that_differ_share_nothing(served, other) -> None:
    """Chunks have equally many bytes in nearly all cases, so that nothing but the identity can tell them apart."""
    first, twin, stranger = (served.engine(**kind) for kind in (BASE, BASE, {**BASE, **other}))
    ask(first, "first")
    assert ask(stranger, "stranger") == 0
    assert ask(twin, "twin") == 96
    assert ask(stranger, "again") == len(PROMPT) // other.get("chunk_tokens", CHUNK) * other.get("chunk_tokens", CHUNK)
    assert len(served.cache.spaces) == 2
    sizes = {space.slot_bytes for space in served.cache.spaces}
    assert len(sizes) == 1 or stranger.shape.tp > 1 or stranger.shape.pp > 1


def test_the_served_name_and_place_of_a_model_do_not_matter(served) -> None:
    first = served.engine()
    ask(first, "a")
    renamed = served.engine()
    renamed.config.model_config.served_model_name = "other"
    space = decider(renamed)._namespace
    moved = copy.deepcopy(renamed.config)
    moved.model_config.model = moved.model_config.hf_config._name_or_path = "/models/elsewhere"
    assert identity.model_fingerprint(moved, "test-model") == space.model
    assert ask(renamed, "b") == 96


def test_what_the_model_does_with_its_weights_matters() -> None:
    config = make_config(DENSE, CONNECTOR, {}, "recompute", False)
    known = identity.model_fingerprint(config, "weights")
    changes: list[Callable[[Any], None]] = [
        lambda model: setattr(model.hf_config, "rope_theta", 123456.0),
        lambda model: setattr(model, "dtype", "torch.float64"),
        lambda model: setattr(model, "quantization", "fp8"),
        lambda model: setattr(model, "hf_overrides", {"rope_scaling": {"factor": 2.0}}),
    ]
    found = {known, identity.model_fingerprint(config, "other-weights")}
    for change in changes:
        other = copy.deepcopy(config)
        change(other.model_config)
        found.add(identity.model_fingerprint(other, "weights"))
    assert len(found) == 2 + len(changes)


# ---- weights -------------------------------------------------------------------------------------------


def model(directory: Path, size: int = 300_000) -> Path:
    """A directory that looks like a model's."""
    directory.mkdir(parents=True)
    for n in range(2):
        with (directory / f"model-{n}.safetensors").open("wb") as file:
            file.write(bytes([n + 1]) * min(size, 100))
            file.truncate(size)
    (directory / "tokenizer.json").write_text("{}")
    return directory


def flip(file: Path, at: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([byte ^ 1]))


def digest(directory: Path) -> bytes:
    identity.weights_digest.cache_clear()
    return identity.weights_digest(str(directory))


def test_equal_weights_elsewhere_have_an_equal_digest(tmp_path) -> None:
    one, two = model(tmp_path / "one"), model(tmp_path / "two" / "deeper")
    (two / "tokenizer.json").write_text("another")
    assert digest(one) == digest(two)


@pytest.mark.parametrize("size", [300_000, identity.PIECE_BYTES + 5])
@pytest.mark.parametrize("name", ["model-0.safetensors", "model-1.safetensors"])
def test_a_flipped_byte_is_noticed_wherever_it_is(tmp_path, size, name) -> None:
    directory = model(tmp_path / "model", size)
    known = digest(directory)
    for place in (0, 77_777, size // 2, size - 1):
        flip(directory / name, place)
        assert digest(directory) != known, place
        flip(directory / name, place)
    assert digest(directory) == known


def test_the_names_of_hugging_face_blobs_stand_for_their_bytes(tmp_path) -> None:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    found = []
    for name in ("ab" * 32, "cd" * 32, "not-a-digest"):
        (blobs / name).write_bytes(b"the same bytes")
        snapshot = tmp_path / f"snapshot-{name[:2]}"
        snapshot.mkdir()
        (snapshot / "model.safetensors").symlink_to(blobs / name)
        found.append(digest(snapshot))
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "model.safetensors").write_bytes(b"the same bytes")
    assert len(set(found)) == 3
    assert digest(plain) == found[2], "a blob without a digest for a name is read"


def test_invented_weights_are_shared_with_nobody(tmp_path) -> None:
    config = make_config(DENSE, CONNECTOR, {}, "recompute", False)
    named = identity.model_fingerprint(config, "name")
    assert named == identity.model_fingerprint(config, "name")
    config.load_config.load_format = "dummy"
    assert len({named, identity.model_fingerprint(config, "name"), identity.model_fingerprint(config, "name")}) == 3


def test_the_longest_sequence_counts_where_the_rotary_embedding_depends_on_it() -> None:
    found = set()
    for rope in ("default", "longrope"):
        for longest in (256, 512):
            config = make_config(Shape(max_tokens=longest), CONNECTOR, {}, "recompute", False)
            config.model_config.hf_config.update({"rope_parameters": {"rope_type": rope, "rope_theta": 1e4}})
            found.add(identity.model_fingerprint(config, "name"))
    assert len(found) == 3


def test_renamed_longer_and_missing_files_are_noticed(tmp_path) -> None:
    directory = model(tmp_path / "model")
    found = {digest(directory)}
    (directory / "model-0.safetensors").rename(directory / "model-9.safetensors")
    found.add(digest(directory))
    with (directory / "model-9.safetensors").open("ab") as file:
        file.write(b"\0")
    found.add(digest(directory))
    (directory / "model-9.safetensors").unlink()
    found.add(digest(directory))
    assert len(found) == 4


def test_a_model_without_weights_needs_a_name() -> None:
    """The harness's model has a configuration only."""
    with pytest.raises(ConfigError, match=r"no weight files in .*set engine\.fingerprint"):
        identity.model_fingerprint(make_config(DENSE, CONNECTOR, {}, "recompute", False))
