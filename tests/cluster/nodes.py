"""What the fork server of these tests plays: members of a cluster, each a process of its own, in a namespace or not."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from typing import Any

from headwater.demo.namespaces import enter
from headwater.transports import handshake
from tests.node.peers import Channel, serve, serve_orders


def member(
    channel: Channel, address: str, namespace: str, protocols: tuple[int, int], settings: dict[str, Any]
) -> None:
    """A node process that speaks a range of protocols, in the network namespace of this path if one is given."""
    if namespace:
        opened = os.open(namespace, os.O_RDONLY)
        enter(opened)
        os.close(opened)
    threading.excepthook = _end
    handshake.OLDEST, handshake.NEWEST = protocols  # type: ignore[misc]
    serve(channel, address, **settings)


def _end(failed: threading.ExceptHookArgs) -> None:
    """What escapes from a thread of a node ends it, for the test to see."""
    traceback.print_exception(failed.exc_value)
    os._exit(70)


if __name__ == "__main__":
    serve_orders(int(sys.argv[1]), globals())
