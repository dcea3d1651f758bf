"""A node's cluster in Prometheus' words; peers are named, since who is slow is what an operator wants to know."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

State = dict[str, Any]

PEER_LEVELS = {
    "latency_s": "The measured latency of reads from a peer, once there was one.",
    "bytes_s": "The measured rate of reads from a peer, once there was one.",
    "in_flight_bytes": "Bytes that a peer was asked for and that have not come yet.",
}
SERVED = {
    "chunks": "Chunks that were lent to peers.",
    "bytes": "Bytes that were lent to peers.",
    "missing": "Parts that peers asked for and that were not here.",
    "from_disk": "Chunks that came up from disk for peers.",
    "late": "Loans that ended before the peer was through.",
}
SERVER = {
    "turned_away": "Connections that were closed because there were too many.",
    "protocol_errors": "Connections that ended because what came was not the protocol.",
    "corrupt": "Payloads from peers whose checksum was wrong.",
    "abandoned": "Loans that ended with their connection or their deadline.",
}


def of_cluster(state: State | None) -> Iterator[Metric]:
    """The families of a node that is in a cluster; none for one that is alone."""
    if state is None:
        return
    directory = state["directory"]
    yield GaugeMetricFamily("headwater_cluster_members", "Members, this node included.", value=state["members"])
    yield GaugeMetricFamily(
        "headwater_directory_well", "1 while the directory answers.", value=int(bool(directory["well"]))
    )
    yield GaugeMetricFamily(
        "headwater_directory_queued", "Changes that the directory has yet to be told.", value=directory["queued"]
    )
    yield CounterMetricFamily(
        "headwater_directory_walks", "How often everything was announced anew.", value=directory["walks"]
    )
    yield CounterMetricFamily(
        "headwater_peer_corrupt_chunks",
        "Chunks from peers whose checksum was wrong; they were dropped.",
        value=state["corrupt_chunks"],
    )
    yield from _of_peers(state["peers"])
    for name, text in SERVED.items():
        yield CounterMetricFamily(f"headwater_served_{name}", text, value=state["served"][name])
    for name, text in SERVER.items():
        yield CounterMetricFamily(f"headwater_peer_server_{name}", text, value=state["server"][name])
    refused = CounterMetricFamily("headwater_peer_server_refused", "Handshakes that were refused.", labels=["reason"])
    for reason, count in state["server"]["refused"].items():
        refused.add_metric([reason], count)
    yield refused
    orders = CounterMetricFamily("headwater_orders", "Copies that others were asked to make.", labels=["reason"])
    for reason, count in state["orders"]["sent"].items():
        orders.add_metric([reason], count)
    yield orders


def _of_peers(peers: list[State]) -> Iterator[Metric]:
    labels = ["peer", "transport"]
    well = GaugeMetricFamily("headwater_peer_well", "1 while a peer may be read from.", labels=labels)
    read = CounterMetricFamily("headwater_peer_read_bytes", "Bytes that came from a peer, verified.", labels=labels)
    hedged = CounterMetricFamily("headwater_peer_hedged", "Reads of a peer that went on elsewhere.", labels=labels)
    for it in peers:
        key = [it["name"], it["transport"]]
        well.add_metric(key, int(it["health"] == "well"))
        read.add_metric(key, it["read_bytes"])
        hedged.add_metric(key, it["hedged"])
    yield from (well, read, hedged)
    for name, text in PEER_LEVELS.items():
        gauge = GaugeMetricFamily(f"headwater_peer_{name}", text, labels=labels)
        for it in peers:
            if it[name] is not None:
                gauge.add_metric([it["name"], it["transport"]], it[name])
        yield gauge
