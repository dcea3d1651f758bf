"""What the plug-in's tests share: a node with engines around it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Any]:
    """Makes a node with settings of its own: `serve(memory=1 << 20, load_lease_s=0.1)`."""
    from tests.engines.served import Served  # brings vLLM in, which not every test here needs

    made: list[Served] = []

    def make(memory: int = 16 << 20, **node: Any) -> Served:
        directory = tmp_path / f"{len(made)}"
        directory.mkdir(mode=0o700)
        made.append(Served(directory, memory, **node))
        made[-1].start()
        return made[-1]

    yield make
    for it in made:
        it.close()


@pytest.fixture
def served(serve: Any) -> Any:
    """A node of 16 MiB."""
    return serve()
