"""What a run of a suite says: for programs (JSON), for documents (Markdown), for people (tables)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import msgspec
from rich.console import Console
from rich.table import Column, Table

from headwater.bench.harness import Result, Spec, Suite
from headwater.bench.machine import Machine


@dataclass(frozen=True, slots=True)
class Report:
    """One run: the machine, the figures in the suite's order, and why those that are missing are missing."""

    suite: str
    machine: Machine
    results: tuple[Result, ...]
    missing: tuple[tuple[Spec, str], ...] = ()
    options: str = ""

    def json(self) -> str:
        """The contract of `headwater bench NAME --json`."""
        said = {
            "machine": self.machine.as_dict(),
            "figures": [asdict(it.figure) for it in self.results],
            "missing": [{"name": spec.name, "reason": reason} for spec, reason in self.missing],
        }
        return msgspec.json.format(msgspec.json.encode(said), indent=2).decode()

    def markdown(self) -> str:
        """Two tables, ready for a document."""
        lines = [f"`headwater bench {self.suite}{self.options}`, {self.machine.taken_at}", ""]
        lines += _markdown_table(("machine", ""), _machine_rows(self.machine))
        lines += ["", *_markdown_table(COLUMNS, [_cells(it) for it in self.results])]
        names = dict.fromkeys(it.figure.yardstick for it in self.results if it.figure.yardstick)
        if names:
            lines += ["", f"Yardsticks, in the same rounds: {'; '.join(names)}."]
        lines += [f"\nNot measured: `{spec.name}`: {reason}." for spec, reason in self.missing]
        return "\n".join(lines) + "\n"

    def print(self, console: Console) -> None:
        """The same for a terminal."""
        about = Table("machine", "", title=f"headwater bench {self.suite}{self.options}", title_justify="left")
        for row in _machine_rows(self.machine):
            about.add_row(*row)
        console.print(about)
        figures = Table(*(Column(name, no_wrap=name != "what") for name in COLUMNS))
        for it in self.results:
            style = None if it.figure.met is None else "green" if it.figure.met else "red"
            figures.add_row(*_cells(it), style=style)
        console.print(figures)
        for spec, reason in self.missing:
            console.print(f"not measured: {spec.name}: {reason}")


COLUMNS = ("figure", "median", "quartiles", "unit", "yardstick", "ratio", "target", "met", "CPU s/GB", "what")


def _cells(result: Result) -> tuple[str, ...]:
    figure, reading = result.figure, result.reading
    return (
        figure.name,
        show_number(figure.value),
        f"{show_number(reading.low)} - {show_number(reading.high)}",
        figure.unit,
        _optional(figure.yardstick_value, show_number),
        _optional(figure.ratio, lambda it: f"{it:.2f}"),
        figure.target or "-",
        "-" if figure.met is None else "yes" if figure.met else "no",
        _optional(figure.cpu_s_per_gb, lambda it: f"{it:.3f}"),
        f"{result.spec.about}; n={reading.samples}",
    )


def _optional(value: float | None, show: Callable[[float], str]) -> str:
    return "-" if value is None else show(value)


def show_number(value: float) -> str:
    """Three figures, or all of the whole part: `0.0731`, `8.75`, `112`, `3,412,000`."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _machine_rows(machine: Machine) -> list[tuple[str, str]]:
    load = f"load average {machine.load_before:g} before, {machine.load_after:g} after"
    return [
        ("CPU", f"{machine.cpu}, {machine.cores} cores for us{', virtual' if machine.hypervisor else ''}"),
        ("memory", f"{machine.memory_bytes / 2**30:.1f} GiB"),
        ("huge pages", f"{machine.huge_pages}; for shared memory: {machine.shared_huge_pages}"),
        ("kernel", machine.kernel),
        ("software", f"headwater {machine.headwater} (copies: {machine.copies}), Python {machine.python}"),
        ("meanwhile", f"{load}; {machine.busy_percent:g} % busy, {machine.steal_percent:g} % stolen"),
    ]


def _markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return lines + [f"| {' | '.join(it.replace('|', chr(92) + '|') for it in row)} |" for row in rows]


def list_table(suites: Sequence[Suite]) -> Table:
    """What can be measured, for `--list`."""
    table = Table(*(Column(name, no_wrap=name != "what") for name in ("suite", "figure", "unit", "target", "what")))
    for suite in suites:
        for spec in suite.specs:
            target = spec.goal.text(spec.unit) if spec.goal else "-"
            table.add_row(suite.name, spec.name, spec.unit, target, spec.about)
    return table
