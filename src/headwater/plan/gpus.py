"""GPUs by name: memory, dense 16-bit operations a second, memory bandwidth."""

from __future__ import annotations

from dataclasses import dataclass

from headwater.errors import ConfigError
from headwater.values import MIB, nearest, parse_size


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. `host_way` and `peer_way` are the names of its links in `links.WAYS`; empty where it has none."""

    name: str
    memory_bytes: int
    flops_s: float
    memory_bytes_s: float
    host_way: str = "pcie5"
    peer_way: str = ""


GPUS: dict[str, Gpu] = {
    it.name: it
    for it in (
        # Memory as the drivers report it, a little less than the name says. Operations and bandwidth: the makers' data
        # sheets of the SXM (OAM) modules, bf16 on dense matrices (half of what they print "with sparsity").
        Gpu("a100-80gb", 81920 * MIB, 312e12, 2.039e12, "pcie4", "nvlink3"),
        Gpu("a800-80gb", 81920 * MIB, 312e12, 2.039e12, "pcie4"),
        Gpu("h100", 81559 * MIB, 989e12, 3.35e12, "pcie5", "nvlink4"),
        Gpu("h800", 81559 * MIB, 989e12, 3.35e12, "pcie5"),
        Gpu("h200", 143771 * MIB, 989e12, 4.8e12, "pcie5", "nvlink4"),
        Gpu("b200", 183359 * MIB, 2250e12, 7.7e12, "pcie5", "nvlink5"),
        Gpu("l40s", 46068 * MIB, 362e12, 0.864e12, "pcie4"),
        Gpu("mi300x", 196288 * MIB, 1307e12, 5.3e12, "pcie5"),
    )
}


def parse_gpu(text: str) -> Gpu:
    """A GPU by name, or `NAME=memory,TFLOP/s,TB/s`, as in `own=48GiB,181,0.96`. Raises ConfigError."""
    name, equals, figures = text.partition("=")
    if not equals:
        if name.lower() not in GPUS:
            raise ConfigError(
                f"--gpu {text!r} is not known, the nearest is {nearest(name.lower(), GPUS)!r}; "
                f"give NAME=memory,TFLOP/s,TB/s, as in own=48GiB,181,0.96, or one of {', '.join(GPUS)}"
            )
        return GPUS[name.lower()]
    parts = figures.split(",")
    try:
        memory, teraflops, terabytes = parts
        gpu = Gpu(name, parse_size(memory), float(teraflops) * 1e12, float(terabytes) * 1e12)
    except (ValueError, ConfigError) as error:
        raise ConfigError(f"--gpu {text!r} is not NAME=memory,TFLOP/s,TB/s; write it as own=48GiB,181,0.96") from error
    if not name or not gpu.memory_bytes or not 0 < gpu.flops_s <= 1e18 or not 0 < gpu.memory_bytes_s <= 1e16:
        raise ConfigError(f"--gpu {text!r} needs a name and figures above 0; write it as own=48GiB,181,0.96")
    return gpu
