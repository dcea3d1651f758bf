"""Fields of a record that somebody else wrote: what is wrong is said with the field, the value and the remedy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

TOKENS_MAX = 1 << 30
NUMBER_MAX = (1 << 64) - 1
SHOWN = 60
NAME_MAX = 1024


class BadRecord(ValueError):
    """A line that is no request; the reader adds the file and the line."""

    def __init__(self, field: str, value: object, remedy: str) -> None:
        super().__init__(f"{field} = {show(value)}: {remedy}")
        self.field, self.value, self.remedy = field, value, remedy


def show(value: object) -> str:
    """A value as an error says it: short, on one line, nothing that moves a cursor."""
    text = repr(value)
    text = "".join(it if it.isprintable() else "?" for it in text)
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def whole(record: Mapping[str, Any], field: str, least: int, most: int, default: int | None = None) -> int:
    """A whole number within limits, both included; the default, if there is one, where the field is absent or null."""
    value = record.get(field)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        missing = "is missing; " if field not in record else ""
        raise BadRecord(field, value, f"{missing}write a whole number from {least} to {most}")
    return value


def number(record: Mapping[str, Any], field: str) -> float:
    """A finite number that is not negative."""
    value = record.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        missing = "is missing; " if field not in record else ""
        raise BadRecord(field, value, f"{missing}write a time as a number that is not negative")
    return float(value)


def name(record: Mapping[str, Any], field: str) -> str:
    """Text, or a number as text; empty where the field is absent or null."""
    value = record.get(field)
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int) or len(str(value)) > NAME_MAX:
        raise BadRecord(field, value, f"write text of at most {NAME_MAX} characters, or leave it out")
    return str(value)


def numbers(record: Mapping[str, Any], field: str) -> tuple[int, ...]:
    """Whole numbers of 64 bits; none where the field is absent or null."""
    value = record.get(field)
    if value is None:
        return ()
    if not isinstance(value, list):
        raise BadRecord(field, value, "write a list of whole numbers")
    for it in value:
        if isinstance(it, bool) or not isinstance(it, int) or not 0 <= it <= NUMBER_MAX:
            raise BadRecord(field, it, f"its items are whole numbers from 0 to {NUMBER_MAX}")
    return tuple(value)


def moment(text: str, field: str) -> float:
    """Seconds since 1970 of an ISO 8601 time; one without a zone is taken as UTC."""
    try:
        found = datetime.fromisoformat(text.strip())
    except ValueError:
        raise BadRecord(field, text, "write an ISO 8601 time, as in 2026-11-16T18:17:03.979Z") from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
