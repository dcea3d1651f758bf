"""The official client against a whole Conductor over two toy engines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import openai
import pytest

from tests.conductor.engine import Script
from tests.conductor.openai_suite import SUITE, Rig
from tests.conductor.running import running, until


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with TemporaryDirectory(prefix="hw") as folder, running(Path(folder)) as fleet:
        for engine in fleet.engines:
            engine.otherwise = Script(token_s=0.001)
        with openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
            yield Rig(
                client,
                "toy",
                calls=True,
                running=lambda: sum(it.running for it in fleet.engines),
                until=lambda fact: until(fact, fleet.logs, 2.0),
            )


@pytest.mark.parametrize("name", SUITE)
def test_the_official_client(rig: Rig, name: str) -> None:
    SUITE[name](rig)
