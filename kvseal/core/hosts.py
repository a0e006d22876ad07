"""What the name of a host stands for. Never connects to anything."""

from __future__ import annotations

import ipaddress
import socket


def addresses_of(host: str) -> set[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Every address of this name, or the address that it is, however written. Raises `OSError` for one that nobody can resolve."""
    return {ipaddress.ip_address(str(info[4][0]).partition("%")[0]) for info in socket.getaddrinfo(host, None)}
