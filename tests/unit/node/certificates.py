"""Certificates that the tests of links and of transports use: two authorities that know nothing of each other."""

from __future__ import annotations

from pathlib import Path

from kvseal.core.config import TLSFiles
from kvseal.handoff.tcp import TLS
from kvseal.node.channel import client_context, server_context

FOLDER = Path(__file__).parent / "tls"
OURS = TLSFiles(FOLDER / "node.pem", FOLDER / "node.key", FOLDER / "authority.pem")
OTHERS = TLSFiles(FOLDER / "other_node.pem", FOLDER / "other_node.key", FOLDER / "other_authority.pem")
IMPOSTOR = TLSFiles(OTHERS.certificate, OTHERS.key, OURS.authority)
"""Trusts ours, and shows a certificate that ours did not sign."""


def contexts(files: TLSFiles) -> TLS:
    """As a node has them, for its pages."""
    return TLS(server_context(files), client_context(files))
