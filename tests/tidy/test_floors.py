"""Imports point down, the core is pure, nothing goes in circles."""

from collections.abc import Callable, Iterable

import pytest

from tests.tidy import floors
from tests.tidy.source import Finding, Source, python_files, snippet

Rule = Callable[[list[Source]], Iterable[Finding]]

CORE = "src/headwater/core/pool.py"
NODE = "src/headwater/node/driver.py"
CLI = "src/headwater/cli.py"

RULES: list[Rule] = [
    floors.check_floors,
    floors.check_core,
    floors.check_outside,
    floors.check_local_imports,
    floors.check_cycles,
]

BAD: list[tuple[Rule, str, str]] = [
    (floors.check_floors, CORE, "from headwater.node.driver import Driver"),
    (floors.check_floors, CORE, "from ..node import driver"),
    (floors.check_floors, CORE, "def f():\n    import headwater.tiers.host"),
    (floors.check_floors, CORE, "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import headwater.node"),
    (floors.check_floors, NODE, "from headwater.sim import world"),
    (floors.check_floors, NODE, "from headwater import sim"),
    (floors.check_floors, NODE, "from headwater import Client"),
    (floors.check_floors, NODE, "import headwater"),
    (floors.check_floors, NODE, "from headwater import __version__"),
    (floors.check_floors, NODE, "from headwater.metrics import State"),
    (floors.check_floors, NODE, "import importlib\nimportlib.import_module('headwater.engines.vllm')"),
    (floors.check_floors, "src/headwater/tiers/host.py", "import headwater.transports.shm"),
    (floors.check_floors, "src/headwater/errors.py", "import headwater.core"),
    (floors.check_floors, "src/headwater/helpers.py", ""),
    (floors.check_floors, NODE, "from headwater.helpers import thing"),
    *(
        (floors.check_core, CORE, f"import {name}")
        for name in ["time", "random", "asyncio", "threading", "os", "socket", "torch", "logging", "numpy", "os.path"]
    ),
    (floors.check_core, CORE, "from time import monotonic"),
    (floors.check_core, CORE, "def f():\n    from secrets import token_bytes"),
    (floors.check_core, CORE, "from headwater.config import Config"),
    (floors.check_outside, NODE, "import torch"),
    (floors.check_outside, NODE, "def f():\n    import vllm.config"),
    (floors.check_outside, NODE, "import requests"),
    (floors.check_outside, "src/headwater/tiers/host.py", "from prometheus_client import Counter"),
    (floors.check_local_imports, NODE, "def f():\n    import json"),
    (floors.check_local_imports, NODE, "class A:\n    async def f(self):\n        from headwater.core import pool"),
    (floors.check_local_imports, NODE, "def f():\n    from headwater.engines import paged_kv"),
    (floors.check_local_imports, CLI, "def f():\n    from headwater.node import server"),
]

GOOD: list[tuple[Rule, str, str]] = [
    (floors.check_floors, NODE, "from headwater.version import VERSION\nfrom headwater.core.pool import Pool"),
    (floors.check_floors, NODE, "from headwater.node.messages import Hello\nfrom headwater.tiers import host"),
    (floors.check_floors, "src/headwater/tiers/host.py", "import headwater._kernels"),
    (floors.check_floors, "src/headwater/config.py", "from headwater.errors import ConfigError"),
    (floors.check_floors, CLI, "from headwater.bench import report\nfrom headwater.engines import paged_kv"),
    (floors.check_core, CORE, "import hashlib\nfrom collections.abc import Iterator\nfrom headwater.types import Key"),
    (floors.check_core, NODE, "import time, os"),
    (floors.check_outside, NODE, "import numpy as np\nimport msgspec\nimport os.path"),
    (floors.check_local_imports, NODE, "import json\nif True:\n    import os\nclass A:\n    import re"),
    (floors.check_local_imports, "src/headwater/engines/vllm.py", "def f():\n    import torch.cuda"),
    (floors.check_local_imports, CLI, "def f():\n    from headwater.bench import node"),
]


@pytest.mark.parametrize("rule", RULES)
def test_the_house_is_tidy(rule: Rule) -> None:
    findings = list(rule(python_files("src")))
    assert not findings, "\n" + "\n".join(map(str, findings))


@pytest.mark.parametrize(("rule", "path", "text"), BAD)
def test_a_breach_is_caught(rule: Rule, path: str, text: str) -> None:
    assert list(rule([snippet(text, path)]))


@pytest.mark.parametrize(("rule", "path", "text"), GOOD)
def test_good_code_passes(rule: Rule, path: str, text: str) -> None:
    assert list(rule([snippet(text, path)])) == []


def circle(*texts: tuple[str, str]) -> list[str]:
    sources = [snippet(text, f"src/headwater/core/{name}.py") for name, text in texts]
    return [finding.text for finding in floors.check_cycles(sources)]


def test_cycles_are_caught_however_they_are_written() -> None:
    assert circle(("a", "import headwater.core.b"), ("b", "from headwater.core import a"))
    assert circle(("a", "from headwater.core.b import x"), ("b", "def f():\n    from headwater.core.a import y"))
    assert circle(("a", "from . import b"), ("b", "from .c import x"), ("c", "import headwater.core.a"))
    assert circle(("__init__", "from headwater.core.a import x"), ("a", "from headwater.core import x"))


def test_a_diamond_is_no_cycle() -> None:
    assert not circle(("a", "from . import b, c"), ("b", "from . import d"), ("c", "from . import d"), ("d", ""))


def test_every_rule_has_a_breach_that_it_catches() -> None:
    shown = {rule for rule, _, _ in BAD} | {floors.check_cycles}
    assert shown == set(RULES)
