"""A sender in a process of its own: ``python -m kvseal.lab.page_server``, for tests that kill it, freeze it or fill the network.

Owns one arena of sealed pages and one transport that offers them. One JSON line on standard input says what to make; one on standard output
says where it is; after that each input line is a command: ``withdraw T``, ``offer T RECEIVER``, ``reuse PAGE``, ``exit``.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from kvseal.core.ids import Scope
from kvseal.exec.backends.cpu import new_arena
from kvseal.handoff.make import make_transport
from kvseal.handoff.proof import Move
from kvseal.handoff.transport import Source
from kvseal.kv.geometry import KVGeometry
from kvseal.lab.pages import digests_of, payload, write_digested, write_page

SCOPE = Scope(b"scope of a test.")
NONCE_BASE = 1_000_000
KINDS = 16
"""Different contents; page p has content p % KINDS."""


def geometry_of(layers: int) -> KVGeometry:
    """Pages of about 12 KiB a layer; 5 layers and a little make 64 KiB."""
    return KVGeometry(layers=layers, kv_heads=4, head_dim=48, page_tokens=16, weights_digest=b"page server")


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # whoever prints, it is not an answer
    order = json.loads(sys.stdin.readline())
    geometry = geometry_of(order["layers"])
    pages = order["pages"]
    arena = new_arena(geometry, pages, shared=True)
    folds = []
    contents = [payload(geometry, bytes([kind])) for kind in range(min(pages, KINDS))]
    digests = [digests_of(geometry, content) for content in contents]
    for page in range(pages):
        kind = page % len(contents)
        fold = write_digested(arena.memory, geometry, page, digests[kind], NONCE_BASE + page, SCOPE, page, contents[kind])
        folds.append(base64.b64encode(fold).decode())
    transport = make_transport(
        order["transport"], arena.memory, file=arena.file, incarnation=order["incarnation"], secret=bytes.fromhex(order["secret"])
    )
    stamps = [word for page in range(pages) for word in (page, NONCE_BASE + page)]
    print(
        json.dumps({"endpoint": base64.b64encode(transport.endpoint).decode(), "folds": folds, "pid": os.getpid()}),
        file=answers,
        flush=True,
    )
    for line in sys.stdin:
        command, *words = line.split()
        if command == "exit":
            break
        if command == "offer":
            transport.send(words[0], words[1], stamps)
        elif command == "withdraw":
            transport.withdraw(words[0])
        elif command == "reuse":
            page = int(words[0])
            write_page(arena.memory, geometry, page, nonce=7, scope=SCOPE, ordinal=page, content=payload(geometry, b"other"))
        print("done", file=answers, flush=True)
    transport.close()


@dataclass
class PageServer:
    """The process above, from outside."""

    process: subprocess.Popen[str]
    source: Source
    folds: list[bytes]
    geometry: KVGeometry

    @classmethod
    def start(cls, transport: str, secret: bytes, *, pages: int, layers: int = 5, incarnation: str = "sender-00000001") -> PageServer:
        command = [sys.executable, "-P", "-m", "kvseal.lab.page_server"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        order = {"transport": transport, "secret": secret.hex(), "pages": pages, "layers": layers, "incarnation": incarnation}
        answer = _asked(process, json.dumps(order))
        try:
            said: dict[str, Any] = json.loads(answer)
        except ValueError:
            process.kill()
            raise RuntimeError(f"the page server did not start: {answer!r}") from None
        source = Source(incarnation, base64.b64decode(said["endpoint"]))
        return cls(process, source, [base64.b64decode(fold) for fold in said["folds"]], geometry_of(layers))

    def tell(self, command: str) -> None:
        _asked(self.process, command)

    def moves(self, destinations: list[int], first: int = 0) -> list[Move]:
        """Pages `first` on, to these pages of ours."""
        size = self.geometry.page_tokens
        return [
            Move(first + i, first + i, NONCE_BASE + first + i, page, self.folds[first + i], size) for i, page in enumerate(destinations)
        ]

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def _asked(process: subprocess.Popen[str], line: str) -> str:
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the page server has no pipes")
    process.stdin.write(line + "\n")
    process.stdin.flush()
    return process.stdout.readline()


if __name__ == "__main__":
    main()
