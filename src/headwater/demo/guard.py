"""Child processes that end even if their parent is killed: a guard watches a pipe that only the parent holds."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from headwater.config import child_environment
from headwater.demo.processes import Child, Children

WATCH = """
groups=' '
while read -r verb group; do
  case $verb in
    add) groups="$groups$group " ;;
    drop) groups="${groups%% $group *} ${groups#* $group }" ;;
  esac
done
for group in $groups; do kill -9 "-$group"; done
"""
"""Its input ends when the parent is gone, whatever the reason; what is on the list by then goes, too."""


class GuardedChildren(Children):
    """See `Children`; a parent that is killed leaves none behind either."""

    def __enter__(self) -> Self:
        self._guard = subprocess.Popen(
            ["sh", "-c", WATCH],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=child_environment({}),
            start_new_session=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait()

    def start(self, name: str, command: Sequence[str], environment: dict[str, str], log: Path) -> Child:
        """Start and remember a child."""
        child = super().start(name, command, environment, log)
        self._tell(f"add {child.group}")
        return child

    def end(self, *children: Child) -> None:
        """Stop some of them now, all at the same time."""
        super().end(*children)
        for child in children:
            self._tell(f"drop {child.group}")

    def stop(self) -> None:
        """Stop all children."""
        groups = [child.group for child in self._children]
        super().stop()
        for group in groups:
            self._tell(f"drop {group}")

    def _tell(self, line: str) -> None:
        assert self._guard.stdin is not None
        os.write(self._guard.stdin.fileno(), f"{line}\n".encode())
