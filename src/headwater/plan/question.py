"""Everything that is asked at once: a model, its hardware and its load, each value with where it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from headwater.enginetimes import EngineTimes
from headwater.errors import ConfigError
from headwater.plan.answer import Input, Origin, Unit
from headwater.plan.capacity import Fit, kv_room_bytes, requests_that_fit
from headwater.plan.cost import Prices
from headwater.plan.gpus import Gpu
from headwater.plan.kv import layout, prefix_bytes, request_bytes
from headwater.plan.links import WayIn
from headwater.plan.shapes import ModelShape
from headwater.plan.sizes import HitCurve
from headwater.plan.speed import Roofline, Speed
from headwater.types import KVLayout
from headwater.values import GIB

TIB = 1024 * GIB


@dataclass(frozen=True)
class Question:
    """The values of one plan. `origins` says of each field where it came from; those not named were assumed.

    `dram_bytes` and `ssd_bytes` are a host's, which has `host_gpus` GPUs: an instance has its GPUs' share.
    """

    shape: ModelShape
    gpu: Gpu
    tp: int
    kv_width: float
    ways: tuple[WayIn, ...]
    handoff: WayIn
    times: EngineTimes | None = None
    curve: HitCurve | None = None
    chunk_tokens: int = 256
    block_tokens: int = 16
    transfer_tokens: int = 4096
    length_tokens: int = 131072
    input_tokens: int = 8192
    output_tokens: int = 512
    reuse: float = 0.5
    device_reuse: float = 0.0
    utilization: float = 0.9
    reserve_bytes: int = 2 * GIB
    mfu: float = 0.5
    mbu: float = 0.7
    dram_bytes: int = TIB
    ssd_bytes: int = 8 * TIB
    host_gpus: int = 8
    instances: int = 8
    batch_max: int = 256
    ttft_slo_s: float = 2.0
    tpot_slo_s: float = 0.05
    busy: float = 0.7
    hit_rates: tuple[float, ...] = ()
    prices: Prices = field(default_factory=Prices)
    origins: Mapping[str, Origin] = field(default_factory=dict)

    def given(self, name: str, label: str, unit: Unit) -> Input:
        """One field as an input."""
        return Input(label, getattr(self, name), unit, self.origins.get(name, Origin.ASSUMED))

    @property
    def gpu_origin(self) -> Origin:
        """Where the GPU's figures came from."""
        return self.origins.get("gpu", Origin.TABLE)

    @cached_property
    def speed(self) -> Speed:
        """Measured, or by a roofline."""
        return self.times or Roofline(self.shape, self.gpu, self.tp, self.kv_width, self.mfu, self.mbu)

    @cached_property
    def stored(self) -> KVLayout:
        """How chunks are laid out in the cache."""
        return layout(self.shape, self.kv_width, self.chunk_tokens, self.block_tokens, self.tp)

    @cached_property
    def room_bytes(self) -> int:
        """For KV on an instance's GPUs."""
        return kv_room_bytes(self.gpu, self.tp, self.shape.weight_bytes, self.utilization, self.reserve_bytes)

    @property
    def host_share_bytes(self) -> float:
        """An instance's part of its host's DRAM."""
        return self.dram_bytes * self.tp / self.host_gpus

    @property
    def disk_share_bytes(self) -> float:
        """An instance's part of its host's SSDs."""
        return self.ssd_bytes * self.tp / self.host_gpus

    def device_bytes(self, tokens: int) -> int:
        """A request on its GPUs."""
        return request_bytes(self.shape, self.kv_width, tokens, self.tp)

    def moved_bytes(self, tokens: int) -> int:
        """A prefix on its way, in whole chunks, rounded up."""
        return prefix_bytes(self.stored, -(-tokens // self.chunk_tokens) * self.chunk_tokens)

    def fit(self, tokens: int) -> Fit:
        """How many requests of a length an instance holds."""
        device, cached = self.device_bytes(tokens), self.moved_bytes(tokens)
        return requests_that_fit(self.room_bytes, device, cached, self.host_share_bytes, self.disk_share_bytes)

    def check(self) -> None:
        """Raise ConfigError if the model does not fit the hardware."""
        if not self.room_bytes:
            raise ConfigError(
                f"--tp {self.tp}: the weights of {self.shape.name} take {self.shape.weight_bytes / GIB:.0f} GiB, more "
                f"than {self.tp} x {self.gpu.name} have to give; use more GPUs, larger ones, or a smaller "
                "--weight-dtype"
            )
