"""Engines that cost nothing: a server and a worker as scripts, and one that only keeps a diary."""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path

from golden.small_gguf import case_metadata, case_tensors, write_gguf
from golden.small_models import cases

from kvseal.bench.peers.catalogue import Launch
from kvseal.bench.peers.engines import Answer, EngineFailed, TooSlow
from kvseal.bench.peers.workload import Call

SERVER = """
import json, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODE = sys.argv[2]

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def reply(self, status, body):
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self):
        self.reply(200, {"data": [{"id": "fake"}], "build_info": "b7"})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        known = asked["model"] == "fake" and asked["temperature"] == 0 and asked.get("ignore_eos") is True
        warm = asked["max_tokens"] == 1
        if MODE == "broken" and not warm:
            self.reply(400, {"error": {"message": "too long for me"}})
        elif MODE == "slow" and not warm:
            time.sleep(5)
        else:
            count = asked["max_tokens"] - (MODE == "short" and not warm) if known else 0
            self.reply(200, {"choices": [{"token_ids": asked["prompt"][:1] * count}], "usage": {"completion_tokens": count}})

    def log_message(self, *args):
        pass

if MODE == "dead":
    sys.exit("error: this machine has no such instructions")
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""

WORKER = """
import json, sys
print("a library says hello", file=sys.stderr)
print(json.dumps({"version": "1.2"}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked["output_tokens"] == 13:
        print(json.dumps({"error": "RuntimeError: unlucky"}), flush=True)
        break
    counts = [asked["output_tokens"]] * len(asked["prompts"])
    print(json.dumps({"counts": counts, "digest": str(len(asked["prompts"]))}), flush=True)
"""


def fake_server(folder: Path, mode: str = "good") -> Launch:
    script = folder / "server.py"
    script.write_text(SERVER, encoding="utf-8")
    return Launch(command=(sys.executable, str(script), "{port}", mode), over_http=True, start_timeout_s=200.0)


def fake_worker(folder: Path) -> Launch:
    script = folder / "worker.py"
    script.write_text(WORKER, encoding="utf-8")
    return Launch(command=(sys.executable, str(script)), over_http=False, start_timeout_s=200.0)


def small_model(folder: Path) -> Path:
    """A llama of three layers and 96 tokens with a byte-level tokenizer, as a GGUF file."""
    case = next(case for case in cases() if case["name"] == "llama-tied")
    pieces = ["<|doc|>", "<|im_start|>", "<|im_end|>", "he", *(chr(0x21 + index) for index in range(92))]
    tokenizer = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * 93,
        "tokenizer.ggml.merges": ["h e"],
    }
    return write_gguf(folder / "small.gguf", case_metadata(case, "llama") | tokenizer, case_tensors(case, permuted=True))


@dataclass
class DiaryEngine:
    """Answers at once, at the speed it is told, and writes down when it was asked."""

    name: str
    diary: list[str]
    seconds: float = 1.0
    fails_at: int | None = None
    """The how-manieth measured call fails; -1: every call takes too long."""
    noisy_at: int | None = None
    """The how-manieth measured call takes no time at all."""
    ends_run_at: int | None = None
    """At the how-manieth measured call this process is asked to end."""
    about: dict[str, str] = field(default_factory=dict)
    start_s: float = 0.5
    pid: int = 0
    stopped: bool = False
    asked: int = 0

    def ask(self, call: Call, *, timeout_s: float) -> Answer:
        if len(call.prompts[0]) in (64, 512):  # A warm-up.
            return Answer(self.seconds)
        self.asked += 1
        if self.fails_at == -1:
            raise TooSlow
        if self.fails_at == self.asked:
            raise EngineFailed("out of memory")
        self.diary.append(self.name)
        if self.ends_run_at == self.asked:
            signal.raise_signal(signal.SIGTERM)
        if self.noisy_at == self.asked:
            return Answer(0.0)
        return Answer(self.seconds * (1 if call.output_tokens == 1 else 10), f"{call.prompts}{call.output_tokens}")

    def stop(self) -> None:
        self.stopped = True
