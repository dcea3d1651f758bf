"""Each figure at a small size, with real processes: it is taken, it is sane, and nothing is left behind."""

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headwater import _kernels
from headwater.bench import calls, copies, footprint, peers
from headwater.bench.harness import Effort, Experiment, Reading, conclude
from headwater.engines.paged_kv import CpuPagedKV
from headwater.errors import ResourceError, UnavailableError
from headwater.ports import Addresses, BlockIds

pytestmark = pytest.mark.alone

TINY = copies.shape("tiny", "2 layers, 16-token blocks of 1 KiB", 2, 16, 64, 3)
EFFORT = Effort(rounds=2, quick=True)


def take(experiment: Experiment) -> dict[str, Reading]:
    wanted = frozenset(spec.name for spec in experiment.specs)
    readings = experiment.measure(EFFORT, wanted)
    assert wanted <= set(readings)
    taken = {}
    for spec in experiment.specs:
        reading = readings[spec.name]
        if isinstance(reading, Reading):
            assert reading.value > 0 and reading.low <= reading.high and reading.samples >= 1, f"{spec.name}: {reading}"
            conclude(spec, reading)  # a goal relative to a yardstick finds it
            taken[spec.name] = reading
    return taken


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(copies, "QUICK_BYTES", 4 << 20)
    monkeypatch.setattr(peers.tempfile, "tempdir", str(tmp_path))
    before, cores = set(os.listdir("/proc/self/fd")), os.sched_getaffinity(0)
    yield
    assert os.sched_getaffinity(0) == cores
    assert not list(tmp_path.iterdir())
    assert len(set(os.listdir("/proc/self/fd")) - before) <= 0


def test_saves_and_loads() -> None:
    taken = take(copies.experiment(TINY, {"save/1-thread": 1.25}))
    assert set(taken) == {
        *(f"{verb}/tiny/{threads}" for verb in ("save", "load") for threads in ("1-thread", "2-threads")),
        "plain/tiny/1-thread",
        "memcpy/tiny/1-thread",
    }
    memcpy = taken.pop("memcpy/tiny/1-thread")
    for reading in taken.values():
        assert reading.yardstick_value == memcpy.value
        assert reading.cpu_s_per_gb and reading.cpu_s_per_gb > 0


def test_only_what_is_wanted_is_measured() -> None:
    readings = copies.experiment(TINY, {}).measure(EFFORT, frozenset({"load/tiny/1-thread"}))
    assert set(readings) == {"load/tiny/1-thread", "memcpy/tiny/1-thread"}  # the yardstick is always there


def test_lookups() -> None:
    taken = take(calls.LOOKUPS)
    assert taken["lookup/4k/hit/p99"].value >= taken["lookup/4k/hit/p50"].value
    assert taken["lookup/128k/hit/p50"].value > taken["lookup/4k/hit/p50"].value


def test_key_checks() -> None:
    assert len(take(calls.KEY_CHECKS)) == len(calls.BATCHES)


def test_one_small_call() -> None:
    taken = take(calls.SMALL_CALL)
    assert "call/one-core/p50" in taken
    assert all(it.yardstick_value for it in taken.values())


def test_start() -> None:
    assert take(footprint.START)["node/start"].value < peers.START_S


def test_bookkeeping() -> None:
    per_chunk = take(footprint.BOOKKEEPING)["node/bookkeeping"].value
    assert 16 < per_chunk < 2000  # at least the key itself


# ---- the parts --------------------------------------------------------------------------------------------


def test_blocks_are_taken_in_one_random_order_without_repeats() -> None:
    paged = copies.PagedMemory(TINY, 1 << 20)
    taken = np.concatenate([paged.take(7) for _ in range(-(-paged.blocks // 7))])[: paged.blocks]
    assert sorted(taken) == list(range(paged.blocks))
    assert list(taken) != sorted(taken)


def test_a_copy_that_loses_a_byte_is_found() -> None:
    kernels = _kernels.load(_kernels.NATIVE)

    def lossy(
        bases: Addresses,
        blocks: BlockIds,
        places: Addresses,
        *,
        block_bytes: int,
        stride_bytes: int,
        layer_stride_bytes: int,
    ) -> None:
        kernels.scatter(
            bases[:-1],
            blocks,
            places,
            block_bytes=block_bytes,
            stride_bytes=stride_bytes,
            layer_stride_bytes=layer_stride_bytes,
        )

    with peers.node_process(16 << 20) as node:
        paged = copies.PagedMemory(TINY, 1 << 20)
        engine = copies.Engine(TINY, node, paged)
        sound = CpuPagedKV([paged.tensors()], paged.blocks)
        engine.fill(sound)
        engine.verify(sound)
        with pytest.raises(ResourceError, match="differs"):
            engine.verify(CpuPagedKV([paged.tensors()], paged.blocks, kernels=replace(kernels, scatter=lossy)))
        engine.close()


def test_plain_copies_walk_all_of_the_memory() -> None:
    source = np.arange(3 * copies.PIECE_BYTES // 8, dtype=np.uint64)
    for verb in ("memcpy", "copyv"):
        plain = copies.Plain(source, copies.PIECE_BYTES)
        for _ in range(3):
            getattr(plain, verb)()
        assert np.array_equal(plain.target, source)


def test_a_node_that_does_not_start_is_reported_with_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "NODE_COMMAND", (sys.executable, "-c", "raise SystemExit('no room here')"))
    with pytest.raises(UnavailableError, match="no room here"), peers.node_process(1 << 20):
        pytest.fail("it serves")


def test_a_process_is_gone_after_its_context_even_if_the_measurement_fails() -> None:
    pids = []

    def fail() -> None:
        with peers.echo_process() as echo:
            assert echo.cpu_s() > 0
            pids.append(echo.pid)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not Path(f"/proc/{pids[0]}").exists()
