"""The Transfer Engine alone: registered memory, and batches of reads and writes between processes. See
`transfer.engine`."""

from headwater.transfer.descriptor import Descriptor, RemoteSegment, parse_descriptor
from headwater.transfer.engine import Engine, Peer, Segment
from headwater.transfer.inbox import Notification
from headwater.transfer.transfer import Transfer
from headwater.transports.credentials import Credentials, load_credentials
from headwater.types import Outcome

__all__ = [
    "Credentials",
    "Descriptor",
    "Engine",
    "Notification",
    "Outcome",
    "Peer",
    "RemoteSegment",
    "Segment",
    "Transfer",
    "load_credentials",
    "parse_descriptor",
]
