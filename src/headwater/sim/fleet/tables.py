"""Tables of settings, as a file has them, read into the dataclasses that list them; each field says how it is read.

Whatever is not in the dataclass, or does not parse, is refused with its place, the reason and the remedy.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from headwater.errors import ConfigError
from headwater.values import nearest, parse_size

SECONDS_MAX = 1e9
_DURATION = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,12})?)\s*(us|ms|s|m|min|h)")
_DURATION_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
Read = Callable[[object], Any]
Section = TypeVar("Section")


_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2
shown = _SHORT.repr
"""A value for a message, a few words of it: what a file says may be endless when it is written out."""


def by(read: Read) -> dict[str, Any]:
    """How a setting's value is read."""
    return {"read": read}


def reader(kind: type[Any]) -> Read:
    """A reader of a table with the settings of a section."""
    return lambda value: section(kind, value)


def seconds(value: object) -> float:
    """Seconds, 0 or more: a number, or a number and a unit as in 500us, 20ms, 3s, 2m."""
    found = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        found = float(value)
    elif isinstance(value, str) and (match := _DURATION.fullmatch(value.strip().lower())):
        found = float(match.group(1)) * _DURATION_UNITS[match.group(2)]
    if not 0 <= found <= SECONDS_MAX:
        raise ConfigError("not a time of 0 or more; write seconds, or a number and a unit: 500us, 20ms, 3s, 2m")
    return found


def number(least: float, most: float) -> Read:
    """A reader of numbers within limits, both included."""

    def read(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise ConfigError(f"not a number from {least:g} to {most:g}")
        return float(value)

    return read


def size_bytes(value: object) -> int:
    """Bytes, 0 or more."""
    return parse_size(value)


def rate(value: object) -> int:
    """Bytes per second: a size, with or without /s behind it."""
    if isinstance(value, str):
        value = value.strip().removesuffix("/s")
    if (found := parse_size(value)) <= 0:
        raise ConfigError("nothing would ever arrive at 0 bytes per second; write bytes per second, as in 10GB/s")
    return found


def within(place: str, error: ConfigError) -> ConfigError:
    """The same error, with the place it happened at in front."""
    said = str(error)
    name, colon, rest = said.partition(": ")
    if colon and re.fullmatch(r"[a-z_\[][\w.\[\]]*", name):
        dot = "" if name.startswith("[") else "."
        return ConfigError(f"{place}{dot}{name}: {rest}")
    return ConfigError(f"{place}: {said}")


def section(kind: type[Section], value: object) -> Section:
    """A table of settings as the dataclass that lists them."""
    if not isinstance(value, Mapping):
        known = ", ".join(it.name for it in fields(kind))  # type: ignore[arg-type]
        raise ConfigError(f"{shown(value)} is not a table; its settings are {known}")
    return kind(**_settings(kind, value))


def _settings(kind: type[Any], value: Mapping[Any, Any]) -> dict[str, Any]:
    known = {it.name: it for it in fields(kind)}
    for name in value:
        if name not in known:
            raise ConfigError(f"{name}: is not a setting here; the nearest is {nearest(str(name), known)}")
    found = {}
    for name, it in known.items():
        if name not in value:
            if it.default is MISSING and it.default_factory is MISSING:
                raise ConfigError(f"{name}: is missing; write it")
            continue
        if value[name] is None and it.default is None:
            continue
        try:
            found[name] = it.metadata["read"](value[name])
        except ConfigError as error:
            what = "" if isinstance(value[name], Mapping | list) else f"{shown(value[name])} is "
            raise within(name, ConfigError(f"{what}{error}") if str(error).startswith("not ") else error) from None
    return found


def table(value: object) -> dict[str, Any]:
    """Names and values, whatever they are."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{shown(value)} is not a table of names and values")
    return {str(name): content for name, content in value.items()}


def _rows(value: object, what: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{shown(value)} is not a list of {what}; write one `-` line each")
    return list(value)


def each(kind: type[Section], value: object, what: str) -> tuple[Section, ...]:
    """A list of tables, which are `what`, as the dataclass that lists their settings."""
    found = []
    for at, it in enumerate(_rows(value, what)):
        try:
            found.append(section(kind, it))
        except ConfigError as error:
            raise within(f"[{at}]", error) from None
    return tuple(found)
