"""What both demos show of their requests."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from headwater.demo.story import Line

WORDS = ("act", "instance", "reused (tier tokens)")
"""Columns of words; the others are figures."""


def yes(true: bool) -> str:
    """A fact in a word."""
    return "[green]yes[/]" if true else "[red]NO[/]"


def requests_table(title: str, lines: Sequence[Line], *, moved: bool) -> Table:
    """The requests, act by act; with what the engines moved for them, if that is told."""
    table = Table(title=title)
    figures = ("TTFT", "without any cache", "faster", *(("moved",) if moved else ()))
    for name in ("#", *WORDS[:2], "prompt tokens", WORDS[2], *figures):
        table.add_column(name, justify="left" if name in WORDS else "right")
    table.add_column("identical output")
    for number, line in enumerate(lines, 1):
        if number > 1 and line.act != lines[number - 2].act:
            table.add_section()
        table.add_row(
            str(number),
            line.act,
            line.instance,
            f"{line.prompt_tokens:,}",
            f"{line.reused_tokens:,} ({line.tier})",
            f"{line.ttft_s:.2f} s",
            f"{line.ttft_uncached_s:.2f} s",
            f"{line.ttft_uncached_s / line.ttft_s:.1f} x" if line.ttft_s else "",
            *([f"{line.bytes_moved / 1e6:.1f} MB"] if moved else []),
            yes(line.identical),
        )
    return table
