"""What the rules look at: parsed source files, and the imports in them."""

import ast
import functools
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src"

Function = ast.FunctionDef | ast.AsyncFunctionDef
Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Source:
    """One Python file. `path` is relative to the repository, `module` is its dotted name."""

    path: str
    module: str
    text: str

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @property
    def unit(self) -> str:
        """The part of the house that it belongs to: `core` for headwater.core.pool, `cli` for headwater.cli."""
        return self.module.split(".")[1] if "." in self.module else "__init__"

    @property
    def is_package(self) -> bool:
        return self.path.endswith("__init__.py")


@dataclass(frozen=True)
class Finding:
    """One breach of a rule. `where` is `path::qualified.name`, the key of allow-lists."""

    rule: str
    where: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.where.split('::')[0]}:{self.line}: {self.rule}: {self.text}"


@dataclass(frozen=True)
class Import:
    """One imported module, with the names taken from it (none for `import x`)."""

    line: int
    module: str
    names: tuple[str, ...]
    within: str  # qualified name of the function around it, "" at module level


def snippet(text: str, path: str = "src/headwater/node/server.py") -> Source:
    """A source that exists only in a test of a rule."""
    return Source(path, module_name(path), text)


def module_name(path: str) -> str:
    """`headwater.core.pool` for `src/headwater/core/pool.py`."""
    parts = path.removeprefix("src/").removesuffix(".py").split("/")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def python_files(*folders: str) -> list[Source]:
    """Every Python file under the folders, in one order everywhere."""
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    names = [path.relative_to(ROOT).as_posix() for path in paths]
    return [Source(name, module_name(name), path.read_text("utf-8")) for name, path in zip(names, paths, strict=True)]


@functools.cache
def scopes(source: Source) -> list[tuple[ast.AST, tuple[Scope, ...]]]:
    """Every node with the functions and classes around it, outermost first."""
    found: list[tuple[ast.AST, tuple[Scope, ...]]] = []

    def visit(node: ast.AST, around: tuple[Scope, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            found.append((child, around))
            visit(child, (*around, child) if isinstance(child, Scope) else around)

    visit(source.tree, ())
    return found


def qualified(around: tuple[Scope, ...]) -> str:
    """`Class.method` for the scopes around a node."""
    return ".".join(scope.name for scope in around)


def dotted(node: ast.AST) -> str:
    """`os.environ` for the expression os.environ; "" for anything that is not a chain of names."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return ""


@functools.cache
def imports(source: Source) -> list[Import]:
    """Every import of the file, in functions and under TYPE_CHECKING too, and import_module("...") calls."""
    found = []
    for node, around in scopes(source):
        functions = [scope for scope in around if isinstance(scope, Function)]
        within = qualified(around) if functions else ""
        if isinstance(node, ast.Import):
            found += [Import(node.lineno, alias.name, (), within) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = tuple(alias.name for alias in node.names)
            found.append(Import(node.lineno, absolute(source, node), names, within))
        elif isinstance(node, ast.Call) and dotted(node.func).endswith("import_module") and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                found.append(Import(node.lineno, name.value, (), within))
    return found


def absolute(source: Source, node: ast.ImportFrom) -> str:
    """The full name of the module that a `from ... import` names."""
    if node.level == 0:
        return node.module or ""
    parts = source.module.split(".")
    base = parts if source.is_package else parts[:-1]
    base = base[: len(base) - (node.level - 1)]
    return ".".join([*base, *([node.module] if node.module else [])])


def split_allowed(findings: list[Finding], allowed: dict[str, str]) -> tuple[list[Finding], list[str]]:
    """The findings that no allow-list entry covers, and the entries that cover nothing any more."""
    left = [finding for finding in findings if finding.where not in allowed]
    unused = sorted(set(allowed) - {finding.where for finding in findings})
    return left, unused
