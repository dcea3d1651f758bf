"""Calls to a node that move no bytes: prefix lookups, key checks, and one small call against the bare socket.

The node and the bench run on two cores, or both on one, and stay there while a figure is taken: a call that must
wake another core costs several times one that does not, and the scheduler would mix the two.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import ExitStack
from hashlib import sha256

from headwater.bench.echo import MESSAGE_BYTES
from headwater.bench.harness import Contender, Effort, Experiment, Goal, Reading, Readings, Spec, Unmeasured
from headwater.bench.peers import Peer, connect_echo, echo_process, node_process, pinned
from headwater.core.hashing import chunk_keys
from headwater.node.client import Link, Session
from headwater.types import KEY_BYTES, ChunkKey, KVGroup, KVLayout, Namespace, pack_keys

CHUNK_TOKENS = 256
LAYOUT = KVLayout(CHUNK_TOKENS, (KVGroup(16, 256, (1,)),))
"""Slots of one page: what these calls cost does not depend on how many bytes a chunk has."""
NAMESPACE = Namespace("bench", "raw", "calls", LAYOUT.fingerprint())
NODE_BYTES = 64 << 20
CALL_S = 5.0
US, MS = 1e6, 1e3
PROMPTS = {"4k": 4096, "128k": 131_072}
BATCHES = (1000, 4096)
BARE = f"bare Unix socket, {MESSAGE_BYTES} B each way"
TWO_CORES, ONE_CORE = "two-cores", "one-core"


def connect(node: Peer) -> Session:
    """A session of the bench's namespace."""
    link = Link(node.address, f"bench-{os.getpid()}", maps=False, connect_s=CALL_S, call_s=CALL_S)
    return Session(link, NAMESPACE, LAYOUT)


def hold(session: Session, keys: list[ChunkKey]) -> None:
    """Have the node hold a chain of chunks, with whatever bytes are in their slots."""
    reservation = session.reserve(keys)
    assert reservation.covered == len(keys), f"room for {reservation.covered} of {len(keys)} chunks"
    assert session.done(reservation.ticket), "the save came too late"


def random_tokens(count: int, seed: int) -> list[int]:
    """Token ids as an engine has them: Python ints, few of them shared."""
    draw = random.Random(seed)
    return [draw.randrange(128_000) for _ in range(count)]


def random_keys(count: int, seed: int) -> list[ChunkKey]:
    """Keys that name nothing."""
    return [ChunkKey(sha256(b"%d/%d" % (seed, it)).digest()[:KEY_BYTES]) for it in range(count)]


def cores() -> tuple[int, int] | None:
    """Two cores that we may use; None where there is only one."""
    usable = sorted(os.sched_getaffinity(0))
    return (usable[0], usable[1]) if len(usable) > 1 else None


# ---- lookups ----------------------------------------------------------------------------------------------


def measure_lookups(effort: Effort, wanted: frozenset[str]) -> Readings:
    """See LOOKUPS. The keys are hashed anew in every call, as for a request that has just arrived."""
    two = cores()
    root = NAMESPACE.root()
    with ExitStack() as stack:
        node = stack.enter_context(node_process(NODE_BYTES))
        session = connect(node)
        stack.callback(session.close)
        contenders = []
        for size, count in PROMPTS.items():
            known, unknown = random_tokens(count, 1), random_tokens(count, 2)
            hold(session, chunk_keys(root, known, CHUNK_TOKENS))

            def lookup(tokens: list[int], usable: int) -> None:
                assert session.match(chunk_keys(root, tokens, CHUNK_TOKENS)).chunks == usable

            calls = max((1 if effort.quick else 10) * 40_960 // count, 1)
            for kind, tokens, usable in (("hit", known, count // CHUNK_TOKENS), ("miss", unknown, 0)):
                name, work = f"lookup/{size}/{kind}", _bind(lookup, tokens, usable)
                if any(it.startswith(f"{name}/") for it in wanted):
                    contenders.append(Contender(name, work, 1.0, calls, node.cpu_s))
        if two:
            stack.enter_context(pinned([node], *two))
        series = effort.interleave(contenders)
    readings: dict[str, Reading | Unmeasured] = {}
    for name, it in series.items():
        readings |= {
            f"{name}/p50": it.latency(MS),
            f"{name}/p99": it.latency(MS, 99),
            f"{name}/cpu": it.cpu(MS),
        }
    return readings


def _bind(work: Callable[[list[int], int], None], tokens: list[int], usable: int) -> Callable[[], None]:
    return lambda: work(tokens, usable)


LOOKUPS = Experiment(
    "Lookup of a prompt: tokens to keys, one call to the node, usable prefix back; 256-token chunks",
    (
        Spec("lookup/4k/hit/p50", "ms", "4,096 tokens, all held", Goal(at_least=False, plus=0.25)),
        Spec("lookup/4k/hit/p99", "ms", "4,096 tokens, all held, 99th percentile"),
        Spec("lookup/4k/miss/p50", "ms", "4,096 tokens, nothing held", Goal(at_least=False, plus=0.25)),
        Spec("lookup/4k/miss/p99", "ms", "4,096 tokens, nothing held, 99th percentile"),
        Spec("lookup/128k/hit/p50", "ms", "131,072 tokens, all held", Goal(at_least=False, plus=10)),
        Spec("lookup/128k/hit/cpu", "ms", "131,072 tokens, all held, CPU of both ends", Goal(at_least=False, plus=8)),
        Spec("lookup/128k/miss/p50", "ms", "131,072 tokens, nothing held", Goal(at_least=False, plus=10)),
    ),
    measure_lookups,
)

# ---- key checks -------------------------------------------------------------------------------------------


def measure_key_checks(effort: Effort, wanted: frozenset[str]) -> Readings:
    """See KEY_CHECKS."""
    two = cores()
    with ExitStack() as stack:
        node = stack.enter_context(node_process(NODE_BYTES))
        session = connect(node)
        stack.callback(session.close)
        keys = random_keys(max(BATCHES), 3)
        hold(session, keys)
        contenders = []
        for batch in BATCHES:
            if f"keys/batch-{batch}" not in wanted:
                continue
            packed, all_held = pack_keys(keys[:batch]), b"\1" * batch

            def check(packed: bytes = packed, all_held: bytes = all_held) -> None:
                assert session.contains_packed(packed) == all_held

            contenders.append(Contender(f"keys/batch-{batch}", check, batch, 5 if effort.quick else 50))
        if two:
            stack.enter_context(pinned([node], *two))
        series = effort.interleave(contenders)
    return {name: it.rate() for name, it in series.items()}


KEY_CHECKS = Experiment(
    "Key checks through the socket: which of a batch of chunks are held",
    tuple(
        Spec(f"keys/batch-{batch}", "keys/s", f"{batch:,} keys a call, all held", Goal(at_least=True, plus=2e6))
        for batch in BATCHES
    ),
    measure_key_checks,
)

# ---- one small call ---------------------------------------------------------------------------------------


def measure_small_call(effort: Effort, wanted: frozenset[str]) -> Readings:
    """See SMALL_CALL: a lookup of one held chunk."""
    two = cores()
    with ExitStack() as stack:
        node = stack.enter_context(node_process(NODE_BYTES))
        echo = stack.enter_context(echo_process())
        session = connect(node)
        stack.callback(session.close)
        connection = stack.enter_context(connect_echo(echo))
        keys = random_keys(1, 4)
        hold(session, keys)
        message, answer = bytes(MESSAGE_BYTES), bytearray(MESSAGE_BYTES)

        def bare() -> None:
            connection.send(message)
            connection.recv_into(answer)

        def call() -> None:
            session.match(keys)

        calls = 100 if effort.quick else 1000
        contenders = [Contender("bare", bare, 1.0, calls), Contender("call", call, 1.0, calls)]
        readings: dict[str, Reading | Unmeasured] = {}
        one = min(os.sched_getaffinity(0))
        for condition, ends in ((TWO_CORES, two), (ONE_CORE, (one, one))):
            name = f"call/{condition}/p50"
            if name not in wanted:
                continue
            if ends is None:
                readings[name] = Unmeasured("this process may use one core only")
                continue
            with pinned([node, echo], *ends):
                series = effort.interleave(contenders)
            readings[name] = series["call"].latency(US, yardstick=series["bare"])
    return readings


SMALL_CALL = Experiment(
    "One small call to the node: a lookup of one held chunk",
    tuple(
        Spec(f"call/{condition}/p50", "us", about, Goal(at_least=False, factor=1.3, plus=10), BARE)
        for condition, about in ((TWO_CORES, "each end on a core of its own"), (ONE_CORE, "both ends on one core"))
    ),
    measure_small_call,
)
