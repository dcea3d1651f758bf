"""Instances that register at run time in Mooncake's words, as instances of our registry.

Mooncake registers publishers of events, one for each rank; we register instances, whose rank r publishes r ports
further on. So the first rank that comes brings its instance in, and those after it have to fit. What an instance
publishes comes from the host that serves it: who may register cannot make us read from anywhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from headwater.conductor.addresses import origin_of
from headwater.conductor.control.indexer import DEFAULT_TENANT, Gone, Publisher
from headwater.conductor.parts import Registry
from headwater.errors import RefusedError
from headwater.fleetfile.model import InstanceSpec
from headwater.values import split_address

TYPES = ("vllm", "sglang")
SCHEME = "tcp://"


class ChangingRegistry(Registry, Protocol):
    """What a registry offers beside `parts.Registry`."""

    def register(self, spec: InstanceSpec, stamp: int) -> int:
        """An instance joins. Raises RefusedError."""

    def unregister(self, name: str, stamp: int) -> int | None:
        """It gets no more requests; its number, None if there is no such instance."""


class Publishers:
    """What registers and unregisters at one worker."""

    def __init__(self, registry: ChangingRegistry, clock_ns: Callable[[], int], leaves: Callable[[int], None]) -> None:
        """`clock_ns` is a wall clock's; `leaves` is told the number of an instance that gets no more requests."""
        self._registry, self._clock_ns, self._leaves = registry, clock_ns, leaves

    def register(self, publisher: Publisher) -> None:
        """One more publisher, and its instance if that is new; the same again changes nothing. Raises RefusedError."""
        _check(publisher)
        number = self._registry.by_name(publisher.instance_id)
        if number is not None and not self._registry.instances()[number].draining:
            _check_rank(publisher, self._registry.spec(number))
        else:
            self._registry.register(_spec(publisher), self._clock_ns())

    def unregister(self, gone: Gone) -> Sequence[str]:
        """An instance leaves, with all its ranks, of which one may be named; what was removed as
        instance|tenant|rank."""
        number = self._registry.unregister(gone.instance_id, self._clock_ns())
        if number is None:
            return ()
        ranks = self._registry.spec(number).ranks
        self._leaves(number)
        return [f"{gone.instance_id}|{gone.tenant_id}|{rank}" for rank in range(ranks)]


def _check(publisher: Publisher) -> None:
    if publisher.type.lower() not in TYPES:
        raise RefusedError("type", "vLLM or SGLang", "another one", "register the engine itself")
    if publisher.tenant_id != DEFAULT_TENANT:
        raise RefusedError("tenant_id", DEFAULT_TENANT, "another one", "leave it out: instances serve all tenants")
    if publisher.additionalsalt:
        raise RefusedError("additionalsalt", "none", "one", "leave it out: name models apart that differ in it")
    if publisher.url is None:
        return
    served, told = origin_of(publisher.url).host, [publisher.endpoint, publisher.replay_endpoint or publisher.endpoint]
    for name, endpoint in zip(("endpoint", "replay_endpoint"), told, strict=True):
        if _host(endpoint) != served:
            raise RefusedError(name, "an address on the host of `url`", "another host", "register each at its own host")


def _spec(publisher: Publisher) -> InstanceSpec:
    if publisher.url is None:
        raise RefusedError("url", "where the instance serves, http://ADDRESS:PORT", "none", "add it")
    return InstanceSpec(
        name=publisher.instance_id,
        model=publisher.modelname,
        served_name=publisher.modelname,
        url=publisher.url,
        events=_further(publisher.endpoint, -publisher.dp_rank),
        replay=_further(publisher.replay_endpoint, -publisher.dp_rank) if publisher.replay_endpoint else None,
        ranks=max(publisher.ranks or 1, publisher.dp_rank + 1),
        block_tokens=publisher.block_size,
    )


def _check_rank(publisher: Publisher, spec: InstanceSpec) -> None:
    """One that is there already: a further rank, or the same again."""
    if publisher.modelname not in (spec.served_name, spec.model):
        raise RefusedError("modelname", "the model that this instance serves", "another one", "unregister it first")
    if spec.block_tokens not in (None, publisher.block_size):
        raise RefusedError("block_size", str(spec.block_tokens), str(publisher.block_size), "unregister it first")
    if publisher.dp_rank >= spec.ranks:
        raise RefusedError(
            "dp_rank", f"below {spec.ranks}", str(publisher.dp_rank), "say `ranks` when the instance registers first"
        )
    if spec.events is not None and _further(spec.events, publisher.dp_rank) != publisher.endpoint:
        raise RefusedError("endpoint", "the instance's first port and its rank", "another one", "unregister it first")
    if publisher.url is not None and spec.url is not None and origin_of(publisher.url) != origin_of(spec.url):
        raise RefusedError("url", "that of this instance", "another one", "unregister it first")


def _host(endpoint: str) -> str:
    return split_address(endpoint.removeprefix(SCHEME))[0].lower()


def _further(endpoint: str, ports: int) -> str:
    address, _, port = endpoint.rpartition(":")
    if not 0 < int(port) + ports < 1 << 16:
        raise RefusedError("endpoint", "a port from 1 to 65535 for each rank", "another one", "correct it")
    return f"{address}:{int(port) + ports}"
