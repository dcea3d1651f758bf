"""Checks of a node's cluster: are its credentials fit to be used, does the directory answer, who is there?"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Iterator

from headwater.config import NodeConfig
from headwater.directory.open import open_directory
from headwater.doctor.findings import Finding, Verdict
from headwater.errors import ConfigError, HeadwaterError
from headwater.places import mask
from headwater.transports.credentials import load_credentials
from headwater.types import Standing
from headwater.values import split_address

DIRECTORY_S = 2.0


def check_cluster(config: NodeConfig) -> Iterator[Finding]:
    """All checks of the cluster of a node with these settings; nothing for a node that is alone."""
    if not config.directory:
        return
    yield check_credentials(config)
    yield check_directory(config)


def check_credentials(config: NodeConfig) -> Finding:
    """Token and certificates, and whether the address that others connect to may be without."""
    try:
        credentials = load_credentials(config.token_file, config.tls_cert, config.tls_key, config.tls_ca)
    except ConfigError as error:
        return Finding("credentials", Verdict.FAIL, config.token_file or config.tls_cert, str(error))
    host, _ = split_address(config.listen)
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback and not credentials:
        remedy = "a node does not listen there without them: set node.token_file, or node.tls_cert, tls_key and tls_ca"
        return Finding("credentials", Verdict.FAIL, f"none, with node.listen = {config.listen}", remedy)
    if is_loopback:
        remedy = "other hosts cannot reach this node: set node.listen = 0.0.0.0:7420 where there are any"
        return Finding("credentials", Verdict.WARN, f"{credentials!r}, node.listen = {config.listen}", remedy)
    return Finding("credentials", Verdict.OK, repr(credentials))


def check_directory(config: NodeConfig) -> Finding:
    """Whether the directory answers, and who is in the cluster."""
    url = mask(config.directory)
    began_s = time.monotonic()
    try:
        directory = open_directory(config.directory, config.cluster)
        try:
            members = directory.members(began_s + DIRECTORY_S)
        finally:
            directory.close()
    except HeadwaterError as error:
        remedy = "nodes go on by themselves, and share nothing, until it answers"
        return Finding("directory", Verdict.FAIL, f"{url}: {error}", remedy)
    silent = sorted(it.member.name for it in members if it.standing is Standing.SILENT)
    found = f"{url} answers in {(time.monotonic() - began_s) * 1e3:.1f} ms; {len(members)} nodes in {config.cluster}"
    if silent:
        return Finding("directory", Verdict.WARN, found, f"look after {', '.join(silent)}: not heard of for a while")
    return Finding("directory", Verdict.OK, found)
