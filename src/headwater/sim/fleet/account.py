"""What is written down of a run while it is played: each request's fate, and the loads now and then."""

from __future__ import annotations

import hashlib
import math
from array import array
from typing import Any

import numpy as np

from headwater.fleet import Instance
from headwater.sim.fleet.prepared import Prepared
from headwater.sim.fleet.results import Ending, Run

NAN = math.nan


class Account:
    """Columns of a `Run` with a row a request; who knows something of a request writes it into its row."""

    __slots__ = (
        "_running",
        "_sample_s",
        "_samples",
        "_waiting",
        "changed",
        "device",
        "disk",
        "done",
        "ending",
        "first",
        "host",
        "instance",
        "over",
        "peer",
        "predicted",
        "remote",
        "tpot",
        "ttft",
    )

    def __init__(self, count: int, instances: int) -> None:
        self.over = 0
        """How many have ended."""
        self.ending = [-1] * count
        self.instance = [-1] * count
        self.first = [NAN] * count
        """When the first token came."""
        self.ttft, self.tpot, self.done, self.predicted = ([NAN] * count for _ in range(4))
        self.device, self.host, self.disk, self.peer, self.remote = ([0] * count for _ in range(5))
        self.changed: set[int] = set()
        """Instances whose loads are others than when they were sampled last."""
        self._waiting, self._running = (array("q", bytes(8 * instances)) for _ in range(2))
        self._sample_s: list[float] = []
        self._samples: list[bytes] = []

    def sample(self, now: float, live: dict[int, Instance]) -> None:
        """Write down the loads."""
        waiting, running = self._waiting, self._running
        for number in self.changed:
            it = live[number]
            waiting[number], running[number] = it.waiting_tokens, it.running_requests
        self.changed.clear()
        self._sample_s.append(now)
        self._samples += waiting.tobytes(), running.tobytes()

    def fetched_nothing(self, number: int) -> None:
        """Forget what was fetched for a request."""
        for column in (self.host, self.disk, self.peer, self.remote):
            column[number] = 0

    def end(self, number: int, ending: Ending) -> None:
        """It has ended."""
        assert self.ending[number] < 0, f"request {number} ended twice"
        self.ending[number] = ending
        self.over += 1

    def run(self, prepared: Prepared, load: float, settings: dict[str, Any], seed: int) -> Run:
        """All of it, with `log_hash`."""
        ending = np.array(self.ending, np.int8)
        served = ending == Ending.SERVED

        def times(values: list[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
            return np.where(served, np.array(values, np.float64), NAN)

        def tokens(values: list[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
            return np.where(served, np.array(values, np.int64), 0)

        run = Run(
            settings=settings,
            seed=seed,
            arrival_s=prepared.arrival_s / load,
            input_tokens=prepared.input_tokens.copy(),
            output_tokens=prepared.output_tokens.copy(),
            ending=ending,
            instance=np.array(self.instance, np.int32),
            ttft_s=times(self.ttft),
            tpot_s=times(self.tpot),
            done_s=times(self.done),
            predicted_ttft_s=times(self.predicted),
            device_tokens=tokens(self.device),
            host_tokens=tokens(self.host),
            disk_tokens=tokens(self.disk),
            peer_tokens=tokens(self.peer),
            remote_tokens=tokens(self.remote),
            tenants=prepared.tenants,
        )
        if self._sample_s:
            run.sample_s = np.array(self._sample_s)
            loads = np.frombuffer(b"".join(self._samples), np.int64).reshape(len(self._sample_s), 2, -1)
            run.waiting_tokens, run.running = loads[:, 0].copy(), loads[:, 1].copy()
        run.log_hash = log_hash(run)
        return run


def log_hash(run: Run) -> str:
    """Of every request's fate and every sample: runs in which anything happened differently have different ones."""
    digest = hashlib.blake2b(digest_size=16)
    for values in (
        run.ending, run.instance, run.ttft_s, run.tpot_s, run.done_s, run.predicted_ttft_s, run.device_tokens,
        run.host_tokens, run.disk_tokens, run.peer_tokens, run.remote_tokens, run.waiting_tokens, run.running,
    ):  # fmt: skip
        digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()
