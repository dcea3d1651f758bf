"""What a source file may not do, file by file. Breaches that are right are in the allow-lists, each with its reason."""

import ast
from collections.abc import Iterable

from tests.tidy.source import Finding, Function, Scope, Source, dotted, imports, qualified, scopes

# Functions that may catch everything: a driver's one door, where any failure of what is behind it becomes an outcome.
BROAD_EXCEPT_ALLOWED: dict[str, str] = {}

# The only places where a test may sleep.
SLEEP_ALLOWED: dict[str, str] = {
    "tests/node/conftest.py::eventually": "between two looks at another process, which tells nobody; bounded",
    "tests/conductor/faults/clients.py::reached": "the same within a loop",
}

# Host engines call these with keyword arguments that differ from release to release.
KWARGS_ALLOWED = ("src/headwater/engines/vllm",)

# Reading any of these from a peer, a disk or a queue would run code of the sender's choice.
BANNED_IMPORTS = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "multiprocessing"}
BANNED_CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen"}
# Recognised by the last part of the name, because the object in front has any name.
BANNED_METHODS = {"recv_pyobj", "send_pyobj"}
BANNED_LOADS = {("torch", "load"), ("yaml", "load"), ("yaml", "unsafe_load"), ("yaml", "full_load")}
BANNED_ARGUMENTS = {"allow_pickle", "shell"}


def finding(rule: str, source: Source, around: tuple[Scope, ...], node: ast.AST, text: str) -> Finding:
    return Finding(rule, f"{source.path}::{qualified(around)}", getattr(node, "lineno", 1), text)


def check_env(source: Source) -> Iterable[Finding]:
    """The environment read outside config.py, whose functions are for everybody."""
    if source.path == "src/headwater/config.py":
        return
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    for node, around in scopes(source):
        name = dotted(node)
        if name.startswith("os.") and name.removeprefix("os.") in names:
            yield finding("environment", source, around, node, f"{name}: only config.py reads the environment")
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            for alias in node.names:
                if alias.name in names:
                    yield finding("environment", source, around, node, f"from os import {alias.name}")


def check_global(source: Source) -> Iterable[Finding]:
    """State that any function may change."""
    for node, around in scopes(source):
        if isinstance(node, ast.Global):
            yield finding("global", source, around, node, f"global {', '.join(node.names)}")


def is_public(around: tuple[Scope, ...], name: str) -> bool:
    """Whether a function or class is part of a module's surface: no underscore on the way, and in no function."""
    hidden = any(scope.name.startswith("_") for scope in around) or any(isinstance(it, Function) for it in around)
    return not hidden and (not name.startswith("_") or name == "__init__" or name == "__call__")


def check_kwargs(source: Source) -> Iterable[Finding]:
    """Public functions that take any keyword, so that a misspelt one passes."""
    if source.path.startswith(KWARGS_ALLOWED):
        return
    for node, around in scopes(source):
        if isinstance(node, Function) and node.args.kwarg and is_public(around, node.name):
            yield finding("kwargs", source, around, node, f"{node.name}(**{node.args.kwarg.arg})")


def catches_everything(expression: ast.expr | None) -> bool:
    """Whether an except clause, or an argument of suppress(), is bare or as broad as a bare one."""
    if expression is None:
        return True
    if isinstance(expression, ast.Tuple):
        return any(catches_everything(item) for item in expression.elts)
    return dotted(expression).split(".")[-1] in {"Exception", "BaseException"}


def passes_on(handler: ast.ExceptHandler) -> bool:
    """Whether the handler tidies up and raises the same exception again, whatever happens in it."""
    leaves = any(isinstance(node, ast.Return | ast.Break | ast.Continue) for node in ast.walk(handler))
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None and not leaves


def check_broad_except(source: Source) -> Iterable[Finding]:
    """Handlers that would swallow a programmer's error."""
    for node, around in scopes(source):
        if isinstance(node, ast.ExceptHandler) and catches_everything(node.type) and not passes_on(node):
            yield finding("broad except", source, around, node, "catches everything")
        elif (
            isinstance(node, ast.Call)
            and dotted(node.func).split(".")[-1] == "suppress"
            and any(catches_everything(argument) for argument in node.args)
        ):
            yield finding("broad except", source, around, node, "suppresses everything")


def is_false(expression: ast.expr) -> bool:
    return isinstance(expression, ast.Constant) and expression.value is False


def check_unsafe(source: Source) -> Iterable[Finding]:
    """What would run code that came as data."""
    for found in imports(source):
        if found.module.split(".")[0] in BANNED_IMPORTS:
            yield Finding("unsafe", f"{source.path}::{found.within}", found.line, f"imports {found.module}")
        for name in found.names:
            if (found.module, name) in BANNED_LOADS:
                yield Finding("unsafe", f"{source.path}::{found.within}", found.line, f"imports {found.module}.{name}")
    for node, around in scopes(source):
        name = dotted(node)
        parts = name.split(".")
        if isinstance(node, ast.Attribute) and (parts[-1] in BANNED_METHODS or tuple(parts[-2:]) in BANNED_LOADS):
            yield finding("unsafe", source, around, node, name)
        elif isinstance(node, ast.Attribute) and node.attr in BANNED_METHODS:
            yield finding("unsafe", source, around, node, node.attr)
        elif isinstance(node, ast.Call) and dotted(node.func) in BANNED_CALLS:
            yield finding("unsafe", source, around, node, f"{dotted(node.func)}()")
        elif isinstance(node, ast.keyword) and node.arg in BANNED_ARGUMENTS and not is_false(node.value):
            yield finding("unsafe", source, around, node, f"{node.arg}={ast.unparse(node.value)}")


def check_hash(source: Source) -> Iterable[Finding]:
    """The built-in hash(), which differs from process to process and collides by design."""
    for node, around in scopes(source):
        in_its_place = around and around[-1].name == "__hash__"
        if isinstance(node, ast.Call) and dotted(node.func) in {"hash", "builtins.hash"} and not in_its_place:
            yield finding("hash", source, around, node, "hash()")


def is_spared(node: Scope) -> bool:
    """Whether a function says by a decorator that another one carries its documentation."""
    names = {dotted(it).split(".")[-1] for it in node.decorator_list}
    return bool(names & {"overload", "override", "setter", "deleter"})


def check_docstrings(source: Source) -> Iterable[Finding]:
    """Public modules, classes and functions that do not say what they are."""
    if source.tree.body and not ast.get_docstring(source.tree):
        yield Finding("docstring", f"{source.path}::", 1, "the module has none")
    for node, around in scopes(source):
        if not isinstance(node, Scope) or node.name.startswith("_") or not is_public(around, node.name):
            continue
        if not ast.get_docstring(node) and not is_spared(node):
            yield finding("docstring", source, (*around, node), node, f"{qualified((*around, node))} has none")


def check_sleep(source: Source) -> Iterable[Finding]:
    """Tests that wait for time to pass and not for something to happen. asyncio.sleep(0) only yields and is fine."""
    sleepers = {"sleep"}
    for node, around in scopes(source):
        if isinstance(node, ast.ImportFrom) and node.module in {"time", "asyncio"}:
            sleepers |= {alias.asname or "sleep" for alias in node.names if alias.name == "sleep"}
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        if name in {"time.sleep", "asyncio.sleep"} or name in sleepers:
            yields = node.args and isinstance(node.args[0], ast.Constant) and node.args[0].value == 0
            if not yields:
                yield finding("sleep", source, around, node, f"{name}()")
