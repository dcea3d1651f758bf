"""The answers of a plan as people and as programs read them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from headwater.cli.show import show_count, show_size
from headwater.plan.answer import Answer, Figure, Input, Unit
from headwater.plan.gpus import GPUS
from headwater.plan.known import CONFIGS, known_shape
from headwater.plan.kv import token_bytes
from headwater.plan.links import WAYS
from headwater.plan.question import Question


def report(ask: Question, found: Iterable[Answer]) -> RenderableType:
    """Each answer: its figures, the formula, the inputs and where they came from."""
    head = f"{ask.shape.name} on {ask.tp} x {ask.gpu.name} an instance"
    return Group(Text(head, style="bold"), *(_block(it) for it in found))


def _block(answer: Answer) -> RenderableType:
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 2))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim")
    for it in answer.figures:
        table.add_row(it.name, show_value(it), it.note)
    told = Table(box=None, pad_edge=False, show_header=False, padding=(0, 1, 0, 2))
    told.add_column(no_wrap=True, style="dim")
    told.add_column(style="dim")
    told.add_row("formula", answer.formula)
    told.add_row("inputs", "; ".join(show_input(it) for it in answer.inputs))
    return Group("", Text(answer.title, style="bold"), table, told)


def show_input(it: Input) -> str:
    """`length 131,072 tokens (assumed)`."""
    return f"{it.name} {show_value(Figure(it.name, it.value, it.unit))} ({it.origin.value})"


def show_value(it: Figure) -> str:
    """A figure with its unit; a dash where there is none."""
    value = it.value
    if value is None or isinstance(value, str):
        return value or "-"
    match it.unit:
        case Unit.BYTES:
            return show_size(value) if value >= 1 else f"{value:.4g} B"
        case Unit.BYTES_S:
            return f"{value / 1e9:.4g} GB/s"
        case Unit.FLOPS_S:
            return f"{value / 1e12:.4g} TFLOP/s"
        case Unit.SECONDS:
            return show_seconds(value)
        case Unit.SHARE:
            return f"{100 * value:.1f} %"
        case Unit.DOLLARS:
            return f"${value:.4g}"
        case Unit.REQUESTS_S:
            return f"{value:.4g} requests/s"
        case Unit.TOKENS | Unit.REQUESTS | Unit.COUNT | Unit.TEXT:
            text = show_count(int(value)) if value == int(value) else f"{value:,.4g}"
            return f"{text} {it.unit.value}" if it.unit in (Unit.TOKENS, Unit.REQUESTS) else text


def show_seconds(seconds: float) -> str:
    """`26.84 ms`: four figures in the unit that fits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds / 1e-9:.4g} ns" if seconds else "0 s"


def as_json(ask: Question, found: Iterable[Answer]) -> dict[str, Any]:
    """The same for programs: values in bytes, seconds, tokens, dollars."""
    return {
        "model": ask.shape.name,
        "gpu": ask.gpu.name,
        "tp": ask.tp,
        "answers": [
            {
                "key": answer.key,
                "title": answer.title,
                "figures": [
                    {"name": it.name, "value": it.value, "unit": it.unit.value, "note": it.note}
                    for it in answer.figures
                ],
                "formula": answer.formula,
                "inputs": [
                    {"name": it.name, "value": it.value, "unit": it.unit.value, "origin": it.origin.value}
                    for it in answer.inputs
                ],
            }
            for answer in found
        ],
    }


def known_models() -> RenderableType:
    """The tables of models, GPUs and links."""
    models = Table("model", box=None, pad_edge=False)
    for name in ("parameters", "active", "weights", "KV of a token"):
        models.add_column(name, justify="right", no_wrap=True)
    for name in CONFIGS:
        it = known_shape(name)
        total, active = (f"{count / 1e9:.4g} B" for count in (it.weights.total, it.weights.active))
        models.add_row(name, total, active, show_size(it.weight_bytes), show_size(token_bytes(it, it.kv_width)))
    gpus = Table("GPU", box=None, pad_edge=False)
    for name in ("memory", "TFLOP/s, bf16 dense", "TB/s"):
        gpus.add_column(name, justify="right", no_wrap=True)
    for gpu in GPUS.values():
        gpus.add_row(gpu.name, show_size(gpu.memory_bytes), f"{gpu.flops_s / 1e12:g}", f"{gpu.memory_bytes_s / 1e12:g}")
    links = Table("link", "reads", box=None, pad_edge=False)
    for name in ("GB/s, nominal", "GB/s, reached", "latency"):
        links.add_column(name, justify="right", no_wrap=True)
    for way in WAYS.values():
        rates = (f"{rate / 1e9:g}" for rate in (way.nominal_bytes_s, way.effective_bytes_s))
        source = f"{way.source}, each GPU its own" if way.each_gpu else way.source
        links.add_row(way.name, source, *rates, show_seconds(way.latency_s))
    return Group(models, "", gpus, "", links)
