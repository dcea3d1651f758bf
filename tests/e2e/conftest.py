"""What tests with real engines share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def one_process() -> Iterator[None]:
    """Engines have their worker in the scheduler's process, as they do on one GPU.

    On CPUs vLLM gives it one of its own, which imports all of vLLM once more, a quarter of an engine's start, and then
    waits by spinning, which is dear where two engines share a core. A member of a cluster, an engine with a node of its
    own and calibration are tried that way.
    """
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        yield
