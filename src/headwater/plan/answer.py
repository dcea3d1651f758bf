"""An answer: its figures, the formula they come from, and the inputs of that formula, each with where it came from."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Unit(StrEnum):
    """What a figure counts."""

    BYTES = "bytes"
    BYTES_S = "bytes/s"
    SECONDS = "s"
    TOKENS = "tokens"
    REQUESTS = "requests"
    REQUESTS_S = "requests/s"
    COUNT = ""
    FLOPS_S = "FLOP/s"
    SHARE = "share"
    DOLLARS = "$"
    TEXT = "text"


class Origin(StrEnum):
    """Where an input came from."""

    CONFIG = "config.json"
    TABLE = "table"
    OPTION = "option"
    FILE = "file"
    ASSUMED = "assumed"
    COMPUTED = "computed"


@dataclass(frozen=True, slots=True)
class Figure:
    """A value with its unit; None where there is none, and then `note` says why."""

    name: str
    value: float | str | None
    unit: Unit
    note: str = ""


@dataclass(frozen=True, slots=True)
class Input:
    """What went into a formula."""

    name: str
    value: float | str
    unit: Unit
    origin: Origin


@dataclass(frozen=True, slots=True)
class Answer:
    """One question's figures. `key` is its name for programs and does not change."""

    key: str
    title: str
    figures: tuple[Figure, ...]
    formula: str
    inputs: tuple[Input, ...]
