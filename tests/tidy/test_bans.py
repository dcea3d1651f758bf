"""What no source file does, each with a snippet that shows the rule at work."""

from collections.abc import Callable, Iterable

import pytest

from tests.tidy import bans
from tests.tidy.source import Finding, Source, python_files, snippet, split_allowed

Rule = Callable[[Source], Iterable[Finding]]

# Each rule with the folders that it holds for, and what is allowed all the same.
RULES: dict[Rule, tuple[tuple[str, ...], dict[str, str]]] = {
    bans.check_env: (("src",), {}),
    bans.check_global: (("src", "scripts", "benchmarks", "tests"), {}),
    bans.check_kwargs: (("src",), {}),
    bans.check_broad_except: (("src", "scripts", "benchmarks"), bans.BROAD_EXCEPT_ALLOWED),
    bans.check_unsafe: (("src", "scripts", "benchmarks"), {}),
    bans.check_hash: (("src",), {}),
    bans.check_docstrings: (("src",), {}),
    bans.check_sleep: (("tests",), bans.SLEEP_ALLOWED),
}

BAD: list[tuple[Rule, str]] = [
    (bans.check_env, "import os\nx = os.environ['A']"),
    (bans.check_env, "import os\ndef f():\n    return os.getenv('A', '')"),
    (bans.check_env, "import os\nx = dict(os.environ)"),
    (bans.check_env, "from os import environ"),
    (bans.check_env, "from os import path, getenv as g"),
    (bans.check_global, "def f():\n    global x\n    x = 1"),
    (bans.check_kwargs, "def f(**kwargs): ..."),
    (bans.check_kwargs, "class A:\n    def __init__(self, **options): ..."),
    (bans.check_kwargs, "class A:\n    async def f(self, a, *, b=1, **rest): ..."),
    (bans.check_broad_except, "try:\n    f()\nexcept:\n    pass"),
    (bans.check_broad_except, "try:\n    f()\nexcept Exception:\n    pass"),
    (bans.check_broad_except, "try:\n    f()\nexcept (OSError, BaseException) as e:\n    raise ValueError from e"),
    (
        bans.check_broad_except,
        "def g():\n    try:\n        f()\n    except Exception:\n        return 1\n        raise",
    ),
    (bans.check_broad_except, "import contextlib\nwith contextlib.suppress(Exception):\n    f()"),
    (bans.check_broad_except, "import builtins\ntry:\n    f()\nexcept builtins.Exception:\n    pass"),
    (bans.check_unsafe, "import pickle"),
    (bans.check_unsafe, "def f():\n    from pickle import loads"),
    (bans.check_unsafe, "import marshal, shelve"),
    (bans.check_unsafe, "from multiprocessing.connection import Client"),
    (bans.check_unsafe, "x = eval('1')"),
    (bans.check_unsafe, "exec('1')"),
    (bans.check_unsafe, "__import__('os')"),
    (bans.check_unsafe, "import torch\nx = torch.load(f)"),
    (bans.check_unsafe, "from torch import load"),
    (bans.check_unsafe, "import yaml\nx = yaml.load(f, Loader=yaml.Loader)"),
    (bans.check_unsafe, "x = socket.recv_pyobj()"),
    (bans.check_unsafe, "x = self.sockets[0].recv_pyobj()"),
    (bans.check_unsafe, "import numpy\nx = numpy.load(f, allow_pickle=True)"),
    (bans.check_unsafe, "import subprocess\nsubprocess.run('ls', shell=True)"),
    (bans.check_unsafe, "import subprocess\nsubprocess.run('ls', shell=yes)"),
    (bans.check_hash, "x = hash(key)"),
    (bans.check_hash, "class A:\n    def key(self):\n        return hash((1, 2))"),
    (bans.check_docstrings, '"""M."""\ndef f(): ...'),
    (bans.check_docstrings, '"""M."""\nclass A:\n    "A."\n    async def f(self): ...'),
    (bans.check_docstrings, '"""M."""\nclass A:\n    x = 1'),
    (bans.check_docstrings, "x = 1"),
    (bans.check_sleep, "import time\ntime.sleep(1)"),
    (bans.check_sleep, "from time import sleep as nap\nnap(0.1)"),
    (bans.check_sleep, "import asyncio\nasync def f():\n    await asyncio.sleep(0.1)"),
]

GOOD: list[tuple[Rule, str]] = [
    (bans.check_env, "import os\nos.path.join('a')\nenviron = {}\nenviron['A']"),
    (bans.check_global, "def f():\n    x = 1\n    def g():\n        nonlocal x\n        x = 2"),
    (bans.check_kwargs, "def _f(**kwargs): ...\nclass _A:\n    def f(self, **k): ...\ndef g(*args): ..."),
    (bans.check_kwargs, "def outer():\n    def wrapper(*args, **kwargs): ...\n    return wrapper"),
    (bans.check_broad_except, "try:\n    f()\nexcept (OSError, ValueError):\n    pass"),
    (bans.check_broad_except, "try:\n    f()\nexcept BaseException:\n    undo()\n    raise"),
    (bans.check_broad_except, "from contextlib import suppress\nwith suppress(OSError):\n    f()"),
    (
        bans.check_unsafe,
        "import json, yaml\nx = json.load(f)\ny = yaml.safe_load(f)\nself.load(f)\nz = re.compile('a')",
    ),
    (bans.check_unsafe, "import numpy, subprocess\nnumpy.load(f, allow_pickle=False)\nsubprocess.run(['ls'])"),
    (bans.check_hash, "class A:\n    def __hash__(self):\n        return hash(self.key)\nself.hash(1)"),
    (bans.check_docstrings, '"""M."""\ndef _f(): ...\ndef g():\n    "G."\n    def inner(): ...\nclass _B:\n    x = 1'),
    (
        bans.check_docstrings,
        '"""M."""\nclass A:\n    "A."\n    def __init__(self): ...\n    @override\n    def f(self): ...',
    ),
    (bans.check_docstrings, ""),
    (bans.check_sleep, "import asyncio\nasync def f():\n    await asyncio.sleep(0)\nclock.sleep(1)"),
]


@pytest.mark.parametrize("rule", RULES)
def test_the_house_is_tidy(rule: Rule) -> None:
    folders, allowed = RULES[rule]
    findings = [finding for source in python_files(*folders) for finding in rule(source)]
    left, unused = split_allowed(findings, allowed)
    assert not left, "\n" + "\n".join(map(str, left))
    assert not unused, f"the allow-list names what is no breach any more: {unused}"


@pytest.mark.parametrize(("rule", "text"), BAD)
def test_a_breach_is_caught(rule: Rule, text: str) -> None:
    assert list(rule(snippet(text)))


@pytest.mark.parametrize(("rule", "text"), GOOD)
def test_good_code_passes(rule: Rule, text: str) -> None:
    assert list(rule(snippet(text))) == []


def test_every_rule_has_a_breach_that_it_catches() -> None:
    assert {rule for rule, _ in BAD} == set(RULES)


def test_config_may_read_the_environment() -> None:
    assert not list(bans.check_env(snippet("import os\nos.environ['A']", "src/headwater/config.py")))


def test_the_plug_in_may_take_what_its_host_passes() -> None:
    assert not list(bans.check_kwargs(snippet("def f(**kwargs): ...", "src/headwater/engines/vllm/worker.py")))


def test_allow_lists_cover_only_what_they_name() -> None:
    source = snippet("def door():\n    try:\n        f()\n    except Exception:\n        pass\n")
    findings = list(bans.check_broad_except(source))
    assert split_allowed(findings, {f"{source.path}::door": "why"}) == ([], [])
    assert split_allowed(findings, {f"{source.path}::other": "why"}) == (findings, [f"{source.path}::other"])
