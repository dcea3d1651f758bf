"""Recorded releases of vLLM's connector interface, and a stand-in `vllm` package that has no more than one of them.

`scripts/record_vllm_signatures.py` writes the records.
"""

import abc
import ast
import dataclasses
import enum
import importlib
import importlib.abc
import importlib.machinery
import inspect
import json
import logging
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "signatures"
VERSIONS = sorted((it.stem for it in FOLDER.glob("*.json")), key=lambda it: [int(n) for n in it.split(".")])


def table(version: str) -> dict[str, Any]:
    """The record of one release."""
    return json.loads((FOLDER / f"{version}.json").read_text())


def parameters(method: dict[str, Any]) -> list[inspect.Parameter]:
    """A recorded method's parameters without `self` or `cls`; defaults are the source's text."""
    return [
        inspect.Parameter(name, getattr(inspect.Parameter, kind), default=default[0] if default else inspect._empty)
        for name, kind, *default in method["parameters"][1:]
    ]


def live_method(cls: type, name: str) -> dict[str, Any]:
    """A method of an imported class in the form of the record."""
    attribute = inspect.getattr_static(cls, name)
    kind = "method"
    for decorator in (classmethod, staticmethod, property):
        if isinstance(attribute, decorator):
            kind = decorator.__name__
    function = attribute.fget if kind == "property" else getattr(attribute, "__func__", attribute)
    found = []
    for it in inspect.signature(function).parameters.values():
        default = [] if it.default is inspect.Parameter.empty else [repr(it.default)]
        found.append([it.name, it.kind.name, *default])
    return {"kind": kind, "abstract": getattr(attribute, "__isabstractmethod__", False), "parameters": found}


def call_shapes(method: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], dict[str, str]]]:
    """Ways in which callers of that release may pass arguments: by position, by name, without the defaults."""
    these = parameters(method)
    fixed = [it for it in these if it.kind is it.POSITIONAL_OR_KEYWORD]
    needed = [it for it in fixed if it.default is it.empty]
    only_named = {it.name: it.name for it in these if it.kind is it.KEYWORD_ONLY}
    extra = {"some_new_argument": ""} if any(it.kind is it.VAR_KEYWORD for it in these) else {}
    for some in (fixed, needed):
        for cut in range(len(some) + 1):
            by_name = {it.name: it.name for it in some[cut:]}
            yield tuple(it.name for it in some[:cut]), by_name | only_named | extra


class FakeVllm(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports `vllm` from a record: every recorded name is there, and nothing else of vLLM is."""

    def __init__(self, version: str) -> None:
        self.version = version
        self.table = table(version)
        self.packages = {"vllm"}
        for name in self.table["modules"]:
            parts = name.split(".")
            self.packages |= {".".join(parts[:n]) for n in range(1, len(parts))}

    def install(self) -> None:
        """Make `import vllm` find this one; for a process that has not imported the real one."""
        assert "vllm" not in sys.modules
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] != "vllm":
            return None
        if fullname not in self.packages and fullname not in self.table["modules"] and fullname != "vllm.version":
            raise ModuleNotFoundError(f"vLLM {self.version} as recorded has no {fullname}", name=fullname)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=fullname in self.packages)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ in ("vllm", "vllm.version"):
            module.__version__ = self.version
        names = self.table["modules"].get(module.__name__)
        if names is None:
            return
        for name in names["classes"]:
            recorded = self.table["classes"].get(name)
            setattr(module, name, make_class(name, recorded) if recorded else type(name, (), {}))
        for name in names["functions"]:
            setattr(module, name, logging.getLogger if name == "init_logger" else stub(name))
        for name in names["values"]:
            setattr(module, name, types.SimpleNamespace())
        for name, origin in names["imports"].items():
            known = origin in self.table["modules"]
            setattr(module, name, getattr(importlib.import_module(origin), name) if known else type(name, (), {}))


def stub(name: str) -> Callable[..., None]:
    def method(*args: object, **kwargs: object) -> None:
        return None

    method.__name__ = name
    return method


def make_class(name: str, recorded: dict[str, Any]) -> type:
    """A class with the recorded methods, fields and abstractness, whose methods do nothing."""
    if "enum.Enum" in recorded["bases"]:
        return enum.Enum(name, {it: ast.literal_eval(value) for it, value in recorded["values"].items()})
    body: dict[str, Any] = {it: make_method(it, method) for it, method in recorded["methods"].items()}
    if recorded["sets"]:
        body["__init__"] = make_init(recorded)
    bases = (abc.ABC,) if "ABC" in recorded["bases"] else ()
    if not recorded["fields"]:
        return type(name, bases, body)
    factories = {"field(default_factory=dict)": dict, "field(default_factory=set)": set}
    fields = [
        (it, Any, dataclasses.field(default_factory=factories[source])) for it, source in recorded["fields"].items()
    ]
    return dataclasses.make_dataclass(name, fields, bases=bases, namespace=body)


def make_method(name: str, method: dict[str, Any]) -> Any:
    function: Any = stub(name)
    if method["abstract"]:
        function = abc.abstractmethod(function)
    decorators: dict[str, Any] = {"property": property, "classmethod": classmethod, "staticmethod": staticmethod}
    return decorators.get(method["kind"], lambda it: it)(function)


def make_init(recorded: dict[str, Any]) -> Callable[..., None]:
    """An `__init__` that keeps each argument as the recorded attribute of that name, and sets the others to None."""
    signature = inspect.Signature(parameters(recorded["methods"]["__init__"]))

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs).arguments
        for attribute in recorded["sets"]:
            setattr(self, attribute, given.get(attribute.lstrip("_")))
        if "_kv_transfer_config" in recorded["sets"]:
            self._kv_transfer_config = given["vllm_config"].kv_transfer_config

    return __init__
