"""Which host this is, for those who ask whether a peer can pass descriptors to them."""

from __future__ import annotations

import os
from pathlib import Path


def host_id() -> str:
    """Equal for processes that can pass descriptors to each other and reach the same loopback: one boot of one kernel,
    and one network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    return f"{boot}.{os.stat('/proc/self/ns/net').st_ino}"
