"""What tests of several kernels need."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture
def nobody_is_made_to_yield() -> Iterator[None]:
    """The interpreter takes the GIL from nobody: a thread runs only when another gives it up."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    yield
    sys.setswitchinterval(before)
