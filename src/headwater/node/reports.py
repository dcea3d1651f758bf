"""What a member says of itself with each beat: to people, and to the others' placement and quotas. No keys in it."""

from __future__ import annotations

from typing import Any

import msgspec

REPORT_BYTES_MAX = 16 << 10
"""More than the directory would take has no place anywhere."""


class Report(msgspec.Struct, omit_defaults=True):
    """Every part may be missing, and what is not known is ignored: members of other versions say other things."""

    capacity_bytes: int = 0
    used_bytes: int = 0
    tenants: dict[str, int] = {}
    """Bytes in HOST of the tenants that have a quota over the cluster."""
    served_bytes: int = 0
    served_chunks: int = 0
    lookup_tokens: int = 0
    hit_tokens: int = 0
    disk_capacity_bytes: int = 0
    disk_used_bytes: int = 0
    peers: list[dict[str, Any]] = []
    hot: list[dict[str, Any]] = []


_decoder = msgspec.json.Decoder(Report)


def read_report(told: bytes) -> Report:
    """A member's report; an empty one, if it makes no sense: others must not suffer from it."""
    try:
        return _decoder.decode(told or b"{}")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return Report()


def write_report(report: Report) -> bytes:
    """A report for the next beat; if it is too long, what others need of it to place chunks."""
    encoded = msgspec.json.encode(report)
    if len(encoded) > REPORT_BYTES_MAX:
        encoded = msgspec.json.encode(msgspec.structs.replace(report, peers=[], hot=[]))
    if len(encoded) > REPORT_BYTES_MAX:
        encoded = msgspec.json.encode(Report(report.capacity_bytes, report.used_bytes))
    return encoded
