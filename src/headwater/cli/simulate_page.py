"""Simulated runs as one page: a file that needs no other, runs nothing, and asks nobody for anything."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape

from headwater.cli.simulate_plots import Plot
from headwater.cli.simulate_rows import Rows
from headwater.version import VERSION

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
STYLE = """\
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: #222;
  background: #fff; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th { border-bottom: 2px solid #888; } .name { text-align: left; }
tbody tr:hover { background: #f3f6fa; }
img { max-width: 100%; height: auto; }
footer { margin-top: 2rem; color: #777; font-size: .85rem; }
"""


def page(title: str, about: Mapping[str, str], tables: Sequence[Rows], plots: Sequence[Plot]) -> str:
    """The HTML. `about` says what was simulated."""
    facts = Rows("What was simulated", ("", " "), tuple(about.items()), 2)
    parts = [_table(it) for it in (facts, *tables)] + [_plot(it) for it in plots]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n"
        + "\n".join(parts)
        + f"\n<footer>headwater {escape(VERSION)}</footer>\n</body>\n</html>\n"
    )


def _table(table: Rows) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        names = (' class="name"' if at < table.left else "" for at in range(len(cells)))
        return "".join(f"<{tag}{it}>{escape(cell)}</{tag}>" for it, cell in zip(names, cells, strict=True))

    head = f"<thead><tr>{row(table.columns, 'th')}</tr></thead>\n" if any(it.strip() for it in table.columns) else ""
    body = "\n".join(f"<tr>{row(it, 'td')}</tr>" for it in table.rows)
    return f'<h2>{escape(table.title)}</h2>\n<div class="wide"><table>\n{head}<tbody>\n{body}\n</tbody>\n</table></div>'


def _plot(plot: Plot) -> str:
    data = base64.b64encode(plot.svg()).decode()
    return f'<h2>{escape(plot.title)}</h2>\n<img alt="{escape(plot.title)}" src="data:image/svg+xml;base64,{data}">'
