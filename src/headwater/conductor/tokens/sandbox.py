"""Where chat templates run: jinja2's sandbox as transformers sets it up, with bounds on time, steps and size.

A template comes with a model, and what it does depends on what a client sends. The sandbox keeps it from Python; the
bounds keep it from looping for ever or filling memory. Loops, and the operations that make much from little (+, *, **,
%, ~, widths, replace, join), are told to a Budget; everything else costs what is already there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sized
from datetime import datetime
from functools import wraps
from time import monotonic
from typing import Any

from jinja2 import Template, TemplateError, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

RENDER_S = 2.0
STEPS = 4_000_000
WIDTH = 1 << 12
"""Numbers that templates may give to what pads or indents."""
BUDGET = "a render's budget"
"""Its name among a template's variables; one that no template can write."""

WIDE = re.compile(r"\d{5}")
PADDING_FILTERS = ("batch", "center", "format", "indent", "slice", "tojson", "wordwrap")
PADDING_METHODS = ("center", "expandtabs", "ljust", "rjust", "zfill")
DIRECTIVE = re.compile(r"%[-_0^#]?[aAbBdejmUuwWyYGVFDx%]")
"""What strftime may be asked for without its answer changing within a day."""


class OverBudget(Exception):
    """A template took more than it may."""


class Budget:
    """What one render may use: seconds, passes of loops, and characters or items that operations make."""

    def __init__(self, size: int, seconds: float = RENDER_S) -> None:
        self.size = size
        self.made = 16 * size
        self.steps = STEPS
        self.until_s = monotonic() + seconds

    def step(self, count: int) -> None:
        """So many more passes."""
        self.steps -= count
        if self.steps < 0 or monotonic() > self.until_s:
            raise OverBudget

    def make(self, size: int) -> None:
        """An operation is about to make something of this size."""
        self.made -= size
        if size > self.size or self.made < 0:
            raise OverBudget


def budget_of(context: Context) -> Budget:
    """The budget of the render that this is part of."""
    budget: Budget = context.parent[BUDGET]
    return budget


@pass_context
def _counted(context: Context, items: Iterable[Any]) -> Iterable[Any]:
    """What a loop goes over, counted."""
    budget = budget_of(context)
    if isinstance(items, Sized):
        budget.step(len(items))
        return items
    return _counting(budget, items)


def _counting(budget: Budget, items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        budget.step(1)
        yield item


@pass_context
def _joined(context: Context, items: list[Any]) -> str:
    """What `~` makes."""
    made = [str(item) for item in items]
    budget_of(context).make(sum(map(len, made)))
    return str_join(made)


@pass_context
def _join(context: Context, value: Iterable[Any], d: str = "", attribute: Any = None) -> Any:
    items = list(value)
    budget_of(context).make(len(items) * len(str(d)))
    return context.environment.filters["_join"](context.eval_ctx, items, d, attribute)


@pass_context
def _replace(context: Context, s: str, old: str, new: str, count: int | None = None) -> Any:
    check_replace(budget_of(context), str(s), str(old), str(new))
    return context.environment.filters["_replace"](context.eval_ctx, s, old, new, count)


def check_replace(budget: Budget, text: str, old: str, new: str) -> None:
    """Before a text has one thing replaced by another."""
    budget.make(len(text) + (len(text) + 1 if not old else text.count(old)) * len(new))


def check_widths(values: Iterable[Any]) -> None:
    """Before something is padded: no number is large, nor any in a format."""
    for value in values:
        if (isinstance(value, int) and abs(value) > WIDTH) or (isinstance(value, str) and WIDE.search(value)):
            raise OverBudget


def _narrow(padding: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that refuses large numbers. What it is applied to is text or items, and a format only for `format`."""
    formats = padding.__name__ == "do_format"

    @wraps(padding)
    def checked(*args: Any, **kwargs: Any) -> Any:
        plain = [it for it in args if isinstance(it, int)] + [it for it in kwargs.values() if isinstance(it, int)]
        check_widths([*plain, args[0]] if formats else plain)
        return padding(*args, **kwargs)

    return checked


class _Bounding(NodeTransformer):
    """Puts the counting into a template's syntax tree."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "_counted", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        items = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(items, "_joined", [], [], None, None, lineno=node.lineno)


def compile_template(source: str) -> tuple[Template, nodes.Template]:
    """A template, whose renders are given a Budget as the variable BUDGET, and its syntax tree as it was written.

    Raises jinja2.TemplateError if it is none.
    """
    sandbox = _Sandbox()
    return sandbox.from_string(source), sandbox.plain(source)


class _Generation(Extension):
    """`{% generation %}`, which marks what the model says: here it only stands for its content."""

    tags = {"generation"}  # noqa: RUF012 as in jinja2

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

    def _said(self, caller: Callable[[], str]) -> str:
        return caller()


class _Sandbox(ImmutableSandboxedEnvironment):
    """The environment of one template."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = tojson
        self.filters["_join"], self.filters["_replace"] = self.filters["join"], self.filters["replace"]
        self.filters.update({"_counted": _counted, "_joined": _joined, "join": _join, "replace": _replace})
        for name in PADDING_FILTERS:
            self.filters[name] = _narrow(self.filters[name])
        self.globals["raise_exception"] = raise_exception
        self.globals["strftime_now"] = strftime_now
        self.globals.pop("lipsum")

    def plain(self, source: str) -> nodes.Template:
        """A template's syntax tree as it was written."""
        return super()._parse(source, None, None)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Bounding().visit(super()._parse(source, name, filename))
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """One of the operators, within the budget."""
        check_operator(budget_of(context), operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function, within the budget."""
        text, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(text, str):
            if name in PADDING_METHODS:
                check_widths(args)
            elif name == "format":
                check_widths([text])
            elif name == "replace" and len(args) > 1:
                check_replace(budget_of(__context), text, str(args[0]), str(args[1]))
            elif name == "join" and args and isinstance(args[0], Sized):
                budget_of(__context).make(len(args[0]) * len(text))
        return super().call(__context, __obj, *args, **kwargs)


def check_operator(budget: Budget, operator: str, left: Any, right: Any) -> None:
    """Before an operator is applied: what it makes is not too large."""
    if operator == "+":
        if isinstance(left, Sized) and isinstance(right, Sized):
            budget.make(len(left) + len(right))
    elif operator == "*":
        for many, count in ((left, right), (right, left)):
            if isinstance(many, Sized) and isinstance(count, int):
                budget.make(len(many) * max(count, 0))
        if isinstance(left, int) and isinstance(right, int):
            budget.make(left.bit_length() + right.bit_length())
    elif operator == "**":
        if isinstance(left, int) and isinstance(right, int):
            budget.make(left.bit_length() * max(right, 0))
    elif isinstance(left, str):
        check_widths([left])


def raise_exception(message: str) -> None:
    """What templates refuse a conversation with."""
    raise TemplateError(message)


def strftime_now(format: str) -> str:
    """The local time, as transformers tells it."""
    return datetime.now().strftime(format)


def tojson(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON as transformers has it: jinja2's own would escape what HTML would."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
