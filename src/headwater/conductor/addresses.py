"""Where instances may be: a URL from the fleet file, or one that somebody registers while we run.

Whoever may register an instance makes us connect to it. So what is registered has to be an address, which no name
server can change afterwards, and on loopback or in a network that the operator allows. Nobody's instance is at an
address that machines in clouds answer their secrets on, whatever is allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import urlsplit

from headwater.conductor.http.exchange import Origin
from headwater.errors import RefusedError

URL_CHARACTERS = 512
PORTS = {"http": 80, "https": 443}
Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network
METADATA = frozenset(map(ip_address, ("169.254.169.254", "100.100.100.200", "192.0.0.192", "fd00:ec2::254")))
"""Where clouds tell a machine its credentials; the first is link-local, too."""
EXPECTED = "http://ADDRESS:PORT on loopback or in an allowed network"


def networks_of(texts: Sequence[str]) -> tuple[Network, ...]:
    """Networks in CIDR notation. Raises RefusedError."""
    found: list[Network] = []
    for text in texts:
        try:
            found.append(ip_network(text))
        except ValueError:
            raise RefusedError("networks", "addresses like 10.0.0.0/8", repr(text)[:64], "correct it") from None
    return tuple(found)


def origin_of(url: str) -> Origin:
    """Host and port of a URL without path, user or anything else. Raises RefusedError, without the URL in it."""
    if len(url) > URL_CHARACTERS or not url.isascii() or any(it <= " " or it == "\\" for it in url):
        raise _refused("one with other characters")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise _refused("one that cannot be read") from None
    if parts.scheme not in PORTS or not host:
        raise _refused("another scheme, or no host")
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise _refused("one with a user, a query or a fragment")
    if parts.path not in ("", "/") or port == 0 or "%" in host:
        raise _refused("one with a path, a zone or port 0")
    origin = Origin(host, port or PORTS[parts.scheme], parts.scheme == "https")
    address = address_of(host)
    if address is not None and _is_nobodys(address):
        raise _refused("a link-local, metadata, multicast or unspecified address")
    return origin


def check_allowed(origin: Origin, networks: Sequence[Network]) -> None:
    """Raise RefusedError unless an instance may be registered there."""
    address = ip_address("127.0.0.1") if origin.host == "localhost" else address_of(origin.host)
    if address is None:
        raise _refused("a name: name servers may say something else tomorrow")
    if _is_nobodys(address):
        raise _refused("a link-local, metadata, multicast or unspecified address")
    if not address.is_loopback and not any(address in it for it in networks if it.version == address.version):
        raise _refused("an address in none of the allowed networks")


def address_of(host: str) -> Address | None:
    """The address, IPv4 within IPv6 taken out; None for a name."""
    try:
        found = ip_address(host)
    except ValueError:
        return None
    if isinstance(found, IPv6Address):
        return found.ipv4_mapped or found.sixtofour or found
    return found


def _is_nobodys(address: Address) -> bool:
    special = address.is_link_local or address.is_multicast or address.is_unspecified
    return special or address in METADATA or (address.is_reserved and not address.is_loopback)


def _refused(given: str) -> RefusedError:
    return RefusedError("url", EXPECTED, given, "name an instance's own address, or extend `networks`")
