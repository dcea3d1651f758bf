"""Values as people read them."""

from __future__ import annotations

from rich.console import Console

from headwater.config import SETTINGS, public
from headwater.values import memory_size, parse_size, size_or_auto, tenant_sizes

WIDTH_OF_FILES = 1000
SIZES = (memory_size, parse_size, size_or_auto)
UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def console() -> Console:
    """Where tables go: text is never read as markup, and a pipe or a file gets whole lines."""
    screen = Console(markup=False, highlight=False)
    return screen if screen.is_terminal else Console(markup=False, highlight=False, width=WIDTH_OF_FILES)


def plain(text: str) -> str:
    """A client's text with nothing in it that moves a terminal's cursor."""
    return "".join(it if it.isprintable() else "?" for it in text)


def show_size(size_bytes: float) -> str:
    """`1.5 GiB`: at most four figures."""
    power = 0
    while abs(size_bytes) >= 1024 and power < len(UNITS) - 1:
        size_bytes /= 1024
        power += 1
    return f"{size_bytes:.4g} {UNITS[power]}" if power else f"{size_bytes:.0f} B"


def exact_size(size_bytes: int) -> str:
    """A size that reads back as the same number: `4GiB`, `5000000000`."""
    power = 0
    while size_bytes and size_bytes % 1024 == 0 and power < 4:
        size_bytes //= 1024
        power += 1
    return f"{size_bytes}{UNITS[power]}" if power else str(size_bytes)


def show_count(count: int) -> str:
    """`12,345`."""
    return f"{count:,}"


def show_share(part: float, whole: float) -> str:
    """`37.5 %` of a whole; a dash of nothing."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def show_span(seconds: float) -> str:
    """`3 d 4 h`, `5 min 6 s`, `0.7 s`: the two largest parts."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if days:
        return f"{days} d {hours % 24} h"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min {int(seconds % 60)} s"


def show_setting(name: str, value: object) -> str:
    """A setting's value, as it could be written in a flag, without passwords; words where it is empty."""
    value = public(name, value)
    if value is None:
        return "auto"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return exact_size(value) if SETTINGS[name].metadata["parse"] in SIZES else str(value)
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, dict):
        show = exact_size if SETTINGS[name].metadata["parse"] is tenant_sizes else str
        return ",".join(f"{name}={show(it)}" for name, it in value.items()) or "none"
    if isinstance(value, list | tuple):
        return " ".join(map(str, value)) or "none"
    return str(value) or "empty"
