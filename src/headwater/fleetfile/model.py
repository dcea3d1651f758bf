"""What a fleet file says, read and checked. Sizes are in bytes, times in seconds.

`read.py` makes these from YAML; whoever starts or serves a fleet takes them from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from headwater.fleet import Role


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """A node on this host (`socket` empty: started by `headwater up`) or one that runs already."""

    name: str
    socket: str = ""
    """unix:/path of a node that somebody else runs."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Settings of `headwater node` by their names: host_memory, disk, remote, cluster, listen, ..."""


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """One serving engine: started by `headwater up` unless it has a `url`."""

    name: str
    model: str
    """The model's folder or name, for the engine and for the tokenizer."""
    served_name: str
    """What clients call it."""
    role: Role = Role.BOTH
    node: str | None = None
    url: str | None = None
    """http://host:port of an engine that somebody else runs."""
    port: int | None = None
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    events: str | None = None
    """tcp://host:port where it publishes its KV events; None: it is started with some, or there are none."""
    replay: str | None = None
    events_off: bool = False
    ranks: int = 1
    """Data-parallel ranks; rank r publishes r ports further on."""
    capacity_tokens: int | None = None
    """Of its KV cache; None: it is asked."""
    block_tokens: int | None = None
    api_key: str = field(default="", repr=False)
    """What an engine that somebody else runs wants to be asked with; '' for nothing."""
    api_key_file: str | None = None
    """Where that was read from, if it was a file."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What is refused before any memory is taken for it, in each worker."""

    body_bytes: int = 16 << 20
    header_bytes: int = 32 << 10
    headers: int = 100
    json_depth: int = 64
    messages: int = 4096
    tools: int = 512
    prompt_tokens: int = 1 << 20
    event_bytes: int = 16 << 20
    """Of a single event of an instance's stream."""
    answer_bytes: int = 64 << 20
    """Of an answer that is not streamed."""
    replay_bytes: int = 1 << 20
    """So much of a stream is kept for another instance to go on from; longer ones cannot be moved any more."""
    buffered_bytes: int = 256 << 20
    """Of all bodies together that are being read or whose answers have not ended, but for small ones."""
    connections: int = 4096
    requests: int = 1024
    """In progress at instances."""
    waiting: int = 512
    """Taken, but not sent to any instance yet."""


@dataclass(frozen=True, slots=True)
class Times:
    """How long things may take."""

    connect_s: float = 1.0
    first_s: float = 600.0
    """An instance's first byte of an answer."""
    silent_s: float = 60.0
    """An instance's silence within an answer."""
    header_s: float = 10.0
    body_s: float = 60.0
    keep_alive_s: float = 75.0
    stalled_s: float = 60.0
    """A client that reads nothing of what is sent."""
    drain_s: float = 10.0
    """What is under way when the Conductor is told to end."""
    roll_s: float = 3600.0
    """What is under way when its worker is replaced by another one."""
    wait_s: float = 30.0
    """A request that waits for admission."""


@dataclass(frozen=True, slots=True)
class MembersSpec:
    """How the Conductor is a guest among the nodes of its cluster: by what it proves that it may be, as they do."""

    name: str = "conductor"
    """Its own; with certificates, one that its certificate is for."""
    token_file: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_ca: str | None = None


@dataclass(frozen=True, slots=True)
class ConductorSpec:
    """How requests are taken and routed."""

    listen: str = "127.0.0.1:8000"
    control: str = "127.0.0.1:8001"
    """Probes, metrics, `headwater fleet` and the indexer's API; without TLS or credentials only on loopback."""
    control_token_file: str | None = None
    workers: int = 1
    policy: str = "headwater"
    admission: bool = True
    migrate: bool = True
    """Move streams of an instance that dies to another."""
    retries: int = 2
    tokens: str = "local"
    """local: with the model's own tokenizer; engine: ask instances; none: route without."""
    tls_certificate: str | None = None
    tls_key: str | None = None
    explained: int = 10_000
    """How many requests are remembered for `explain`."""
    index_keys: int = 1 << 22
    members: MembersSpec | None = None
    """Nodes that the directory lists, and that have no `socket` here, are watched, too."""
    networks: tuple[str, ...] = ()
    """Where instances may be that register at run time, besides loopback: 10.0.0.0/8."""
    limits: Limits = field(default_factory=Limits)
    times: Times = field(default_factory=Times)


@dataclass(frozen=True, slots=True)
class Slo:
    """What requests without their own are to meet; None: as well as it goes."""

    ttft_s: float | None = None
    tpot_s: float | None = None


@dataclass(frozen=True, slots=True)
class TenantSpec:
    """Who may ask, and how much."""

    name: str
    keys: tuple[str, ...] = ()
    """sha256:HEX of each API key; two during a rotation. `headwater conductor key` makes them."""
    weight: float = 1.0
    priority: int = 0
    concurrency: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    models: tuple[str, ...] = ()
    """Which it may use; empty: all."""
    slo: Slo = field(default_factory=Slo)


@dataclass(frozen=True, slots=True)
class FleetFile:
    """All of it. Without tenants everybody is the tenant '' (and `listen` has to be on loopback)."""

    path: str
    nodes: tuple[NodeSpec, ...]
    instances: tuple[InstanceSpec, ...]
    conductor: ConductorSpec = field(default_factory=ConductorSpec)
    slo: Slo = field(default_factory=Slo)
    tenants: tuple[TenantSpec, ...] = ()
    directory: str | None = None
    """redis://... that Conductors share their loads through, and nodes their inventories."""
    cluster: str = "headwater"
    secret: str = ""
    """Digested into tenants' salts; drawn anew at each start where the file names no `secret_file`."""
