"""`headwater node`: one node, served until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import json
import logging
import resource
import signal
from contextlib import ExitStack
from types import FrameType

from headwater.cli.options import SPELLINGS, add_config, add_setting, add_settings, flag_of, read_config
from headwater.cli.show import show_size
from headwater.config import Effective, NodeConfig, variable
from headwater.errors import HeadwaterError
from headwater.metrics.endpoint import Endpoint
from headwater.node.driver import Node
from headwater.node.server import Server
from headwater.places import parse_remote
from headwater.up.plug_in import transfer_config

log = logging.getLogger(__name__)

SPARE_DESCRIPTORS = 128
EXAMPLES = f"""\
examples:
  headwater node --host-memory 32GiB
  headwater node --host-memory 32GiB --disk /nvme/kv:500GiB --remote redis://kv:6379 --remote s3://bucket/prefix
  headwater node --socket unix:/run/headwater/node.sock --require kv_dtype=bfloat16
  HEADWATER_NODE_HOST_MEMORY=32GiB headwater node --metrics off
  headwater node --cluster prod --directory redis://kv:6379 --listen 0.0.0.0:7420 --token-file /etc/headwater/token

{SPELLINGS}

The node prints one line when it serves. The first SIGTERM or Ctrl-C lets running loads and saves end within
--drain-s, the second ends at once; engines go on without a cache either way. Memory is taken as it is filled or
prefaulted and given back at the end; nothing is left in /dev/shm. What is on --disk stays for the next start. Give
URLs with passwords in the file or in {variable("node.remotes")}: every user of the host can read flags.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Flags for every setting of a node."""
    parser.epilog = EXAMPLES
    add_config(parser)
    add_settings(parser, "node")
    add_setting(parser, "log.level", "--log-level")


def run(arguments: argparse.Namespace) -> int:
    """Serve until told to stop."""
    effective = read_config(arguments)
    config = effective.config
    logging.basicConfig(level=config.log.level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    warn_of_shown_passwords(effective)
    raise_descriptor_limit(config.node.max_sessions)
    with ExitStack() as stack:
        endpoint = None
        if config.node.metrics_address is not None:
            endpoint = Endpoint(*config.node.metrics_address)
            stack.callback(endpoint.close)
        server = _open(config.node)
        drain_on_signals(server)
        if endpoint is not None:
            endpoint.start(server.ask)
        print(greeting(config.node, endpoint), flush=True)
        server.serve_forever()
    return 0


def plug_in(address: str) -> str:
    """What makes a vLLM use this node, to be pasted behind `vllm serve MODEL`."""
    return f"--kv-transfer-config '{json.dumps(transfer_config(address), separators=(',', ':'))}'"


def greeting(config: NodeConfig, endpoint: Endpoint | None) -> str:
    """The one line that says that the node serves."""
    metrics = f"; metrics at {endpoint.url}/metrics" if endpoint is not None else ""
    memory = show_size(config.host_memory)
    return f"serving {memory} at {config.socket}{metrics}; plug in: vllm serve MODEL {plug_in(config.socket)}"


def drain_on_signals(server: Server) -> None:
    """SIGTERM, SIGINT and SIGHUP stop the server; a second one of them ends the process at once."""
    wanted = [it for it in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if signal.getsignal(it) != signal.SIG_IGN]

    def stop(number: int, frame: FrameType | None) -> None:
        server.stop()
        for it in wanted:
            signal.signal(it, signal.default_int_handler)

    for it in wanted:
        signal.signal(it, stop)


def warn_of_shown_passwords(effective: Effective) -> None:
    """Say that what a flag holds is in the process list, for everybody on this host."""
    directory = effective.config.node.directory
    given = {"node.remotes": effective.config.node.remotes, "node.directory": (directory,) if directory else ()}
    for name, urls in given.items():
        if effective.origin[name] == "flag" and any(parse_remote(url).password for url in urls):
            text = "%s has a password, which all users of this host can read in the process list; %s or a file hides it"
            log.warning(text, flag_of(name), variable(name))


def raise_descriptor_limit(sessions: int) -> None:
    """Ask for the descriptors that so many connections and their lifelines need, as far as the hard limit allows."""
    needed = 2 * sessions + SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < needed:
        text = (
            "node.max_sessions = %d needs %d file descriptors, the hard limit is %d; raise it (ulimit -Hn) or lower %s"
        )
        log.warning(text, sessions, needed, hard, "node.max_sessions")


def _open(config: NodeConfig) -> Server:
    node = Node(config)
    try:
        return Server(node)
    except HeadwaterError:
        node.close()
        raise
