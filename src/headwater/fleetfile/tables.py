"""Tables of a fleet file: each setting with its reader; whatever is not one, or cannot be read, is refused with its
place, as in `instances.0.flgas: no such setting; did you mean flags?`.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from headwater.errors import ConfigError
from headwater.places import mask
from headwater.values import nearest

FILE_BYTES = 1 << 20
Read = Callable[[object, str], Any]
"""Reads the value at a place; raises ConfigError that names it."""

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 2, 80, 80


class _Loader(yaml.SafeLoader):
    """Plain data only, and no key of a table twice: the second would silently win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A table whose keys are text."""
        seen: set[str] = set()
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(f"line {line}: the name of a setting is not text")
            if name in seen:
                raise ConfigError(f"line {line}: {name} is there twice; leave one of them")
            seen.add(name)
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return {key if isinstance(key, str) else _word(key): value for key, value in found.items()}

    def compose_node(self, parent: Any, index: Any) -> Any:
        """One node; an alias is refused, because a few lines of them can be as large as memory."""
        if self.check_event(yaml.AliasEvent):
            line = self.line + 1
            raise ConfigError(f"line {line}: an alias (*NAME); write its value there, or use `count` and defaults")
        return super().compose_node(parent, index)


def _word(key: object) -> str:
    """A key that YAML takes for something else than text: `on`, `1`."""
    return {True: "on", False: "off", None: "null"}.get(key, str(key)) if isinstance(key, bool | None) else str(key)


def read_yaml(path: Path) -> dict[str, Any]:
    """A file's table. Raises ConfigError; no text of the file is in it but names."""
    try:
        with path.open("rb") as source:
            data = source.read(FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name a file that can be read") from error
    if len(data) > FILE_BYTES:
        raise ConfigError(f"{path}: more than {FILE_BYTES} bytes; no fleet file is so long")
    try:
        loader = _Loader(data.decode("utf-8"))
        try:
            tree = loader.get_single_data()
        finally:
            loader.dispose()
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply; write tables of settings") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path}: not YAML: {_problem(error)}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: no table of settings; begin with `instances:`")
    return tree


def _problem(error: Exception) -> str:
    """What is wrong and where, without the line itself, in which there may be a secret."""
    mark = getattr(error, "problem_mark", None)
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
    return where + str(getattr(error, "problem", None) or "it cannot be read")


def shown(value: object) -> str:
    """A value for a message: a few words of it, no password of a URL."""
    return mask(_SHORT.repr(value))


def plain(read: Callable[[object], Any]) -> Read:
    """A reader of `values` at a place."""

    def at(value: object, place: str) -> Any:
        try:
            return read(value)
        except ConfigError as error:
            said = str(error)
            what = f"{shown(value)} is " if said.startswith(("not ", "neither ")) else ""
            raise ConfigError(f"{place}: {what}{said}") from None

    return at


def secretly(read: Callable[[object], Any]) -> Read:
    """The same for what may be a secret: the message is without the value."""

    def at(value: object, place: str) -> Any:
        try:
            return read(value)
        except ConfigError as error:
            raise ConfigError(f"{place}: {mask(str(error))}") from None

    return at


def number(least: float, most: float) -> Callable[[object], float]:
    """A reader of numbers within limits, both included."""

    def read(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise ConfigError(f"not a number from {least:g} to {most:g}")
        return float(value)

    return read


def inside(place: str, name: object) -> str:
    """The place of something in something."""
    return f"{place}.{name}" if place else str(name)


def as_table(value: object, place: str) -> Mapping[str, Any]:
    """A table, whatever is in it."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{place}: {shown(value)} is not a table of settings")
    return value


def as_rows(value: object, place: str) -> list[Any]:
    """A list, whatever is in it."""
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{place}: {shown(value)} is not a list; write one `-` line each")
    return list(value)


def read_table(
    value: object, place: str, readers: Mapping[str, Read], required: Collection[str] = ()
) -> dict[str, Any]:
    """The settings of a table that are given; a setting without a value (`name:`) is taken for not given."""
    found: dict[str, Any] = {}
    for name, content in as_table(value, place or "the file").items():
        if name not in readers:
            raise ConfigError(f"{inside(place, name)}: no such setting; did you mean {nearest(name, readers)}?")
        if content is not None:
            found[name] = readers[name](content, inside(place, name))
    for name in required:
        if name not in found:
            raise ConfigError(f"{inside(place, name)}: is missing; write it")
    return found


def table(readers: Mapping[str, Read], required: Collection[str] = ()) -> Read:
    """A reader of tables."""
    return lambda value, place: read_table(value, place, readers, required)


def rows(read: Read) -> Read:
    """A reader of lists."""
    return lambda value, place: tuple(read(it, inside(place, at)) for at, it in enumerate(as_rows(value, place)))
