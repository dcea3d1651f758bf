"""The sizes of a simulated cluster and what goes wrong in it, drawn from its seed.

As with one node (`faults`), each seed turns each kind of fault on or off by itself.
"""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """The fixed sizes of one cluster."""

    nodes: int
    slots: int
    """Chunks that one node's HOST tier holds."""
    requests: int
    rush_s: float
    """The longest time between two requests, of the whole cluster."""
    stems: int
    tokens_s: float | None
    """How fast instances compute, as far as they say."""
    chunk_s: float
    """How fast they do."""
    lease_s: float
    """How long a holder lends."""
    tick_s: float
    """How often a node looks at what has expired."""
    latency_s: float
    bytes_s: float
    batch_chunks: int
    replicas: int
    skew_s: float
    """How far the clocks of two hosts are apart, at most."""
    drift: float
    """How much faster or slower than true time a clock goes, at most."""
    one_sided: float
    """The share of reads where the reader takes the bytes from the holder's memory itself."""


@dataclass(frozen=True, slots=True)
class ClusterFaults:
    """Probabilities by occasion; zero where the kind is off. Without another occasion: at each request's start."""

    drops: float
    """A message's connection breaks. (At each message.)"""
    partitions: float
    """Nothing comes through from some hosts to others for a while, one way or both."""
    islands: float
    """The directory and some hosts cannot reach each other for a while, one way or both."""
    slow_hosts: float
    """A host and its network become many times slower for a while."""
    pauses: float
    """A node is stopped and resumed."""
    kills: float
    """A node dies and comes back, at the same address and under the same name."""
    stays_away: float
    """The share of those deaths that nobody comes back from."""
    leaves: float
    """A node drains, leaves, and comes back."""
    directory_is_away: float
    directory_is_empty: float
    """The directory restarts without anything in it."""
    directory_lags: float
    """An older copy of the directory takes over."""
    corrupts: float
    """A chunk arrives with other bytes. (At each chunk.)"""
    stalls: float
    """A transfer takes far longer than it should, and what was sent lands late. (At each transfer.)"""
    floods: float
    """A node's memory is taken by a prompt that nobody shares."""
    aborts: float
    """An instance gives its save up half-way. (At each save.)"""
    clears: float
    """A node loses what it holds, as by `headwater clear`."""


def draw_cluster_plan(rng: random.Random) -> ClusterPlan:
    """A few nodes with little memory, so that everything is contested."""
    return ClusterPlan(
        nodes=rng.choice((2, 3, 3, 4, 5, 8)),
        slots=rng.choice((12, 16, 32)),
        requests=rng.randrange(30, 60),
        rush_s=rng.choice((0.1, 0.3, 0.6)),
        stems=rng.choice((2, 4, 8)),
        tokens_s=rng.choice((None, 10.0, 40.0, 40.0)),
        chunk_s=rng.choice((0.01, 0.04)),
        lease_s=rng.choice((0.05, 0.3, 1.0)),
        tick_s=rng.choice((0.05, 0.5, 0.5)),
        latency_s=rng.choice((0.0002, 0.001, 0.01)),
        bytes_s=rng.choice((1e5, 1e6, 1e8)),
        batch_chunks=rng.choice((1, 4, 16)),
        replicas=rng.choice((1, 2, 3)),
        skew_s=rng.choice((0.0, 1e6)),
        drift=rng.choice((0.0, 0.0005, 0.01)),
        one_sided=rng.choice((0.0, 0.5, 1.0)),
    )


def draw_cluster_faults(rng: random.Random) -> ClusterFaults:
    """The faults of one cluster."""

    def sometimes(probability: float) -> float:
        return probability if rng.random() < 0.45 else 0.0

    return ClusterFaults(
        drops=sometimes(0.03),
        partitions=sometimes(0.1),
        islands=sometimes(0.1),
        slow_hosts=sometimes(0.1),
        pauses=sometimes(0.1),
        kills=sometimes(0.15),
        stays_away=0.25 if rng.random() < 0.5 else 0.0,
        leaves=sometimes(0.05),
        directory_is_away=sometimes(0.08),
        directory_is_empty=sometimes(0.06),
        directory_lags=sometimes(0.06),
        corrupts=sometimes(0.1),
        stalls=sometimes(0.3),
        floods=sometimes(0.3),
        aborts=sometimes(0.2),
        clears=sometimes(0.05),
    )
