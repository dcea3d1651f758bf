"""Ways that KV moves, and how long they take: latency + bytes / rate."""

from __future__ import annotations

from dataclasses import dataclass

from headwater.errors import ConfigError
from headwater.values import nearest


@dataclass(frozen=True, slots=True)
class WayIn:
    """One way to bring KV to an instance. `each_gpu`: every GPU of the instance has one of its own, so that `tp` of
    them work at once."""

    name: str
    source: str
    """What is read over it, in the words of tiers."""
    nominal_bytes_s: float
    effective_bytes_s: float
    latency_s: float
    each_gpu: bool = False

    def rate_bytes_s(self, tp: int) -> float:
        """What an instance of `tp` GPUs gets."""
        return self.effective_bytes_s * (tp if self.each_gpu else 1)

    def seconds(self, size_bytes: float, tp: int = 1) -> float:
        """How long so many bytes take."""
        return self.latency_s + size_bytes / self.rate_bytes_s(tp)


WAYS: dict[str, WayIn] = {
    it.name: it
    for it in (
        # NVLink 3, 4 and 5: 600, 900 and 1,800 GB/s a GPU, both directions together (NVIDIA A100, H100, B200 data
        # sheets). PCIe 4.0 and 5.0: 16 and 32 GT/s a lane, 16 lanes, 128b/130b. Ethernet: its line rate.
        # What is reached: 0.8 of NVLink and of PCIe, packets' headers off; RDMA 0.87 as Mooncake measures (FAST'25,
        # section 5: 87 GB/s over 4 x 200 Gb/s); TCP 0.9 of 25 GbE; one PCIe 4.0 x4 SSD reads 7.0, of which 0.85.
        WayIn("nvlink3", "DEVICE of a neighbour", 300e9, 240e9, 10e-6, each_gpu=True),
        WayIn("nvlink4", "DEVICE of a neighbour", 450e9, 360e9, 10e-6, each_gpu=True),
        WayIn("nvlink5", "DEVICE of a neighbour", 900e9, 720e9, 10e-6, each_gpu=True),
        WayIn("pcie4", "HOST", 31.5e9, 25.2e9, 20e-6, each_gpu=True),
        WayIn("pcie5", "HOST", 63.0e9, 50.4e9, 20e-6, each_gpu=True),
        WayIn("nvme", "DISK, one SSD", 7.0e9, 6.0e9, 100e-6),
        WayIn("nvme-x4", "DISK, four SSDs", 28.0e9, 24.0e9, 100e-6),
        WayIn("tcp-25g", "another node or REMOTE", 3.125e9, 2.8e9, 200e-6),
        WayIn("roce-100g", "another node or REMOTE", 12.5e9, 10.9e9, 30e-6),
        WayIn("roce-200g", "another node or REMOTE", 25.0e9, 21.75e9, 30e-6),
        WayIn("roce-400g", "another node or REMOTE", 50.0e9, 43.5e9, 30e-6),
    )
}
LATENCY_MAX_S = 60.0


def parse_way(text: str) -> WayIn:
    """A way by name, or `NAME=GB/s[,latency in microseconds]`, as in `wan=1.25,20000`. Raises ConfigError."""
    name, equals, figures = text.partition("=")
    if not equals:
        if name not in WAYS:
            raise ConfigError(
                f"--link {text!r} is not known, the nearest is {nearest(name, WAYS)!r}; "
                f"give NAME=GB/s[,microseconds], as in wan=1.25,20000, or one of {', '.join(WAYS)}"
            )
        return WAYS[name]
    rate, _, latency = figures.partition(",")
    bytes_s, latency_s = _number(text, rate) * 1e9, _number(text, latency or "0") / 1e6
    if not name or not 0 < bytes_s <= 1e15 or not 0 <= latency_s <= LATENCY_MAX_S:
        raise ConfigError(
            f"--link {text!r} needs a name, GB/s above 0 and up to 1,000,000, and microseconds up to 60,000,000; "
            "write it as wan=1.25,20000"
        )
    return WayIn(name, "as given", bytes_s, bytes_s, latency_s)


def _number(text: str, part: str) -> float:
    try:
        return float(part)
    except ValueError as error:
        raise ConfigError(f"--link {text!r}: {part!r} is not a number; write it as wan=1.25,20000") from error
