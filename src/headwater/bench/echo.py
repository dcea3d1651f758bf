"""`python -m headwater.bench.echo PATH`: send back what one client sends, until it hangs up."""

from __future__ import annotations

import os
import socket
import sys

MESSAGE_BYTES = 64


def serve(path: str) -> None:
    """Listen at a path, accept one connection and echo its messages."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path + ".new")
        listener.listen(1)
        os.rename(path + ".new", path)  # so that whoever sees it can connect
        connection, _ = listener.accept()
        message = bytearray(MESSAGE_BYTES)
        with connection:
            while connection.recv_into(message):
                connection.sendall(message)


if __name__ == "__main__":
    serve(sys.argv[1])
