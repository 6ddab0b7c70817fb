"""Restricts the addresses to which the operator connects on behalf of a pool.

A user who may write a pool may also create pods in its namespace, and reach what they reach. The
operator's own pod reaches more: its loopback, and its machine's metadata service, which hands out
the machine's credentials. So the operator resolves a host name first, checks the addresses, and
connects to a checked address, whatever DNS answers later.

In: a host name, networks. Out: addresses, or AddressRefused.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

# Metadata services outside the link-local range: AWS over IPv6, Azure, Oracle and Alibaba.
_METADATA = frozenset(
    ip_address(one) for one in ("fd00:ec2::254", "168.63.129.16", "192.0.0.192", "100.100.100.200")
)
_THIS_HOST = ip_network("0.0.0.0/8")
_NAT64 = ip_network("64:ff9b::/96")


class AddressRefused(Exception):
    """Names the host and the kind of its addresses, but never the addresses of a host name.
    `configured`: only because the operator's networks were restricted."""

    def __init__(self, message: str, *, configured: bool = False) -> None:
        super().__init__(message)
        self.configured = configured


def look_up(host: str, port: int) -> tuple[Address, ...]:
    """All addresses of a host. Blocks on DNS; raise OSError if the host is unknown."""
    entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return tuple(ip_address(str(entry[4][0])) for entry in entries)


def allowed(host: str, addresses: Sequence[Address], networks: Sequence[Network]) -> list[str]:
    """The addresses to which the operator may connect: those in one of `networks`, or without
    `networks` those that `refusal` accepts. Raise AddressRefused if there are none."""
    refusals = {address: refusal(address, networks) for address in addresses}
    accepted = [str(address) for address, reason in refusals.items() if not reason]
    if not accepted:
        reason = next(iter(refusals.values()))
        raise AddressRefused(f"{host} is {reason}", configured=bool(networks))
    return accepted


def refusal(address: Address, networks: Sequence[Network] = ()) -> str:
    """Why the operator does not connect to this address; "" if it does."""
    if networks:
        inside = any(address in network for network in networks)
        return "" if inside else "in none of the networks that the operator may connect to"
    embedded = _embedded(address)
    if embedded is not None:
        return refusal(embedded)
    if address.is_loopback or address.is_unspecified or address in _THIS_HOST:
        return "a loopback address"
    if address.is_link_local or address in _METADATA:
        return "a link-local address, such as a cloud's metadata service"
    if address.is_multicast or address.is_reserved:
        return "a multicast or reserved address"
    return ""


def _embedded(address: Address) -> IPv4Address | None:
    """The IPv4 address to which a gateway or the kernel translates this one."""
    if isinstance(address, IPv4Address):
        return None
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    teredo = address.teredo
    return address.ipv4_mapped or address.sixtofour or (teredo[1] if teredo else None)
