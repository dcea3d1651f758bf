"""How much KV fits: what the weights leave on an instance's GPUs, and how many requests that and the tiers below hold.

room       tp * (memory * utilization - reserve) - weights
running    room / bytes of a request on its GPUs: all their KV must be on DEVICE
sessions   running + (HOST + DISK share of the instance) / bytes of a request in the cache: idle ones wait below
"""

from __future__ import annotations

from dataclasses import dataclass

from headwater.plan.gpus import Gpu
from headwater.plan.kv import request_bytes
from headwater.plan.shapes import ModelShape

TP_MAX = 64


def kv_room_bytes(gpu: Gpu, tp: int, weight_bytes: int, utilization: float, reserve_bytes: int) -> int:
    """What is left for KV on `tp` GPUs that share the weights; `reserve_bytes` are for activations on each."""
    return max(round(tp * (gpu.memory_bytes * utilization - reserve_bytes)) - weight_bytes, 0)


@dataclass(frozen=True, slots=True)
class Fit:
    """Requests of one length that an instance holds."""

    running: int
    host: int
    disk: int

    @property
    def sessions(self) -> int:
        """All whose KV is kept somewhere."""
        return self.running + self.host + self.disk


def requests_that_fit(
    room_bytes: int, device_bytes: int, cached_bytes: int, host_bytes: float, disk_bytes: float
) -> Fit:
    """Whole requests; `device_bytes` and `cached_bytes` are one request's on its GPUs and in the cache, the rest are
    an instance's shares of its host's tiers."""
    if not device_bytes or not cached_bytes:
        return Fit(0, 0, 0)
    return Fit(room_bytes // device_bytes, int(host_bytes // cached_bytes), int(disk_bytes // cached_bytes))


def least_tp(
    shape: ModelShape, gpu: Gpu, width: float, tokens: int, weight_bytes: int, utilization: float, reserve_bytes: int
) -> int | None:
    """The smallest power of two of GPUs on which the weights and one request of `tokens` fit; None if 64 do not."""
    tp = 1
    while tp <= TP_MAX:
        room = kv_room_bytes(gpu, tp, weight_bytes, utilization, reserve_bytes)
        if room >= request_bytes(shape, width, tokens, tp) and _can_share(shape, tp):
            return tp
        tp *= 2
    return None


def _can_share(shape: ModelShape, tp: int) -> bool:
    return all(it.kv_heads % tp == 0 or tp % it.kv_heads == 0 for it in shape.groups)
