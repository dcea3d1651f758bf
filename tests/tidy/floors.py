"""The import floors: `ls src/headwater` is the architecture, and this table is what keeps it so."""

import sys
from collections.abc import Iterable

from tests.tidy.source import Finding, Import, Source, imports

# Imports point down only. Units on one floor do not import each other, but those of floor 0, which are one vocabulary,
# and those of the top, which are what a person starts or reads. A unit that is not in the table may not exist.
#
# Floor 2 has a lower half: `_kernels`, how bytes are copied, knows no tier and no transport, and both use it.
# `metrics` is a view of a node's state, made when somebody asks. The node counts, and knows no view.
FLOORS: dict[str, float] = {
    "types": 0,
    "errors": 0,
    "values": 0,
    "places": 0,
    "version": 0,
    "config": 0,
    "ports": 0,
    "enginetimes": 0,
    "fleet": 0,
    "core": 1,
    "_kernels": 2,
    "traces": 2,  # recorded workloads
    "fleetfile": 2,  # what is to be run
    "tiers": 2.5,
    "transports": 2.5,
    "directory": 2.7,  # kept by servers whose protocol `tiers` speaks
    "node": 3,
    "conductor": 3,
    "sim": 3,
    "engines": 4,
    "client": 4,  # for programs that are no engine
    "transfer": 4,  # the Transfer Engine alone
    "store": 4.5,  # objects in the nodes' memory
    "plan": 4,  # what a fleet needs, by formulas and by simulation
    "calibrate": 4,  # a real engine's step times
    "up": 4,  # a whole fleet on one host, or as manifests
    "bench": 5,
    "demo": 5,
    "doctor": 5,
    "metrics": 5,
    "web": 5,
    "cli": 5,
    "__init__": 5,  # re-exports the public names
    "__main__": 5,
}
FREE_AMONG_THEMSELVES = {0, 5}

# What the core may use of the world: of floor 0 the nouns, of Python what neither waits, draws, reads nor writes.
CORE_UNITS = {"types", "errors", "ports", "fleet", "enginetimes", "core"}
CORE_MODULES = {
    "__future__", "abc", "array", "bisect", "collections", "copy", "dataclasses", "enum", "functools", "hashlib",
    "heapq", "itertools", "math", "operator", "struct", "sys", "types", "typing",
}  # fmt: skip

# Where a package from outside may be named at all. Those that are not listed may not be imported anywhere.
OUTSIDE: dict[str, set[str]] = {
    "numpy": set(FLOORS) - {"core"},
    "msgspec": set(FLOORS) - {"core"},
    "prometheus_client": {"metrics", "engines"},
    "rich": {"cli", "demo", "doctor", "bench"},
    "yaml": {"sim", "traces", "plan", "calibrate", "cli", "fleetfile", "up"},
    "aiohttp": {"conductor"},
    "httptools": {"conductor", "bench"},
    "uvloop": {"conductor", "bench"},
    "zmq": {"conductor"},
    "tokenizers": {"conductor"},
    "torch": {"engines", "bench"},
    "vllm": {"engines"},
    "transformers": {"engines", "demo", "cli"},
    "jinja2": {"cli", "conductor"},  # chat templates
    "huggingface_hub": {"engines"},
    "matplotlib": {"bench", "cli"},
    "xxhash": {"_kernels", "tiers", "transports"},
    "nixl_cu12": {"transports"},
    "obstore": {"tiers"},
    "zstandard": {"tiers"},
    "cryptography": {"tiers"},
}

# Packages that may be missing, or cost seconds to import: the only ones that a function may import.
OPTIONAL = {
    "torch", "vllm", "transformers", "jinja2", "huggingface_hub", "matplotlib", "prometheus_client",
    "obstore", "zstandard", "cryptography", "nixl_cu12", "aiohttp", "httptools", "uvloop", "zmq", "tokenizers",
}  # fmt: skip
# Our own modules that need one of those at their top; commands import them when the command is given.
NEEDS_OPTIONAL = ("headwater.engines", "headwater.bench", "headwater.conductor")


def target_modules(found: Import, known: set[str]) -> list[str]:
    """The modules of ours that one import reaches: `from headwater.core import pool` reaches headwater.core.pool."""
    if found.module != "headwater" and not found.module.startswith("headwater."):
        return []
    inner = [f"{found.module}.{name}" for name in found.names]
    return [name if name in known else found.module for name in inner] or [found.module]


def unit_of(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def check_floors(sources: list[Source]) -> Iterable[Finding]:
    """Imports that point up, sideways between siblings, or to a unit that has no floor."""
    known = {source.module for source in sources}
    for source in sources:
        if source.unit not in FLOORS:
            yield Finding("floor", source.path, 1, f"unit '{source.unit}' has no floor: add it to the table")
            continue
        for found in imports(source):
            for target in target_modules(found, known):
                problem = judge(source.unit, unit_of(target))
                if problem:
                    yield Finding("floor", source.path, found.line, f"imports {target}: {problem}")


def judge(unit: str, target: str) -> str:
    """Why `unit` may not import `target`; "" if it may."""
    if target not in FLOORS:
        return f"unit '{target}' has no floor"
    if unit == target or FLOORS[target] < FLOORS[unit]:
        return ""
    if FLOORS[target] > FLOORS[unit]:
        return f"up from floor {FLOORS[unit]} to {FLOORS[target]}"
    return "" if FLOORS[unit] in FREE_AMONG_THEMSELVES else f"sideways on floor {FLOORS[unit]}"


def check_core(sources: list[Source]) -> Iterable[Finding]:
    """Anything in core that could wait, draw, read, write or log."""
    known = {source.module for source in sources}
    for source in sources:
        if source.unit != "core":
            continue
        for found in imports(source):
            ours = target_modules(found, known)
            for target in ours:
                if unit_of(target) not in CORE_UNITS:
                    yield Finding("core", source.path, found.line, f"imports {target}; core knows {sorted(CORE_UNITS)}")
            if not ours and found.module.split(".")[0] not in CORE_MODULES:
                yield Finding("core", source.path, found.line, f"imports {found.module}, which is not a pure module")


def check_outside(sources: list[Source]) -> Iterable[Finding]:
    """Packages from outside in a unit that must install and start without them."""
    for source in sources:
        for found in imports(source):
            package = found.module.split(".")[0]
            if package in sys.stdlib_module_names or package == "headwater":
                continue
            if package not in OUTSIDE:
                yield Finding("outside", source.path, found.line, f"imports {package}, which headwater does not list")
            elif source.unit not in OUTSIDE[package]:
                yield Finding("outside", source.path, found.line, f"{source.unit} must do without {package}")


LAZY = ("headwater", "headwater.client")
"""The one name that the package offers lazily, because it brings numpy."""


def check_local_imports(sources: list[Source]) -> Iterable[Finding]:
    """Imports in functions, but of what may be missing."""
    for source in sources:
        for found in imports(source):
            package = found.module.split(".")[0]
            if not found.within or package in OPTIONAL:
                continue
            if (source.module, found.module) == LAZY:
                continue
            if FLOORS.get(source.unit) == 5 and found.module.startswith(NEEDS_OPTIONAL):
                continue
            where = f"{source.path}::{found.within}"
            yield Finding("local import", where, found.line, f"imports {found.module} in {found.within}()")


def check_cycles(sources: list[Source]) -> Iterable[Finding]:
    """Modules that import each other, wherever in the file they do it."""
    known = {source.module: source for source in sources}
    edges = {
        name: {target for found in imports(source) for target in target_modules(found, set(known)) if target != name}
        for name, source in known.items()
    }
    state: dict[str, str] = {}
    trail: list[str] = []

    def visit(module: str) -> Iterable[list[str]]:
        state[module] = "open"
        trail.append(module)
        for target in sorted(edges.get(module, ())):
            if state.get(target) == "open":
                yield [*trail[trail.index(target) :], target]
            elif target not in state:
                yield from visit(target)
        trail.pop()
        state[module] = "closed"

    for name in sorted(known):
        if name not in state:
            for cycle in visit(name):
                yield Finding("cycle", known[cycle[0]].path, 1, " -> ".join(cycle))
