"""Real servers in processes of their own, on free ports of the loopback.

Started as ``python servers.py OPTIONS`` in the child, so that the test's interpreter and path are the server's.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

PROJECT = Path(__file__).resolve().parents[2]
READY = re.compile(r"KVSeal is ready after [\d.]+ s at (http://\S+)/v1")
START_TIMEOUT_S = 60.0
ECHO = "kvseal.lab.engine_process"


class ServerProcess:
    """One server. Use as a context manager."""

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        module: str | None = None,
        engine: dict[str, Any] | None = None,
        fleet: dict[str, Any] | None = None,
        **serve: Any,
    ) -> None:
        self.log = log
        options = {"model": str(model), "module": module, "engine": engine or {}, "fleet": fleet, "serve": serve}
        with log.open("wb") as out:
            self.process = subprocess.Popen([sys.executable, str(Path(__file__).resolve()), json.dumps(options)], stdout=out, stderr=out)

    def __enter__(self) -> ServerProcess:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            if found := READY.search(self.text):
                self.url = found[1]
                self.client = httpx.Client(base_url=self.url, timeout=60.0)
                return self
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        self.stop()
        raise AssertionError(f"the server did not start:\n{self.text}")

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.stop()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def engine_pid(self) -> int:
        """The one child of the server process."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        assert len(children) == 1
        return int(children[0])

    def metrics(self, **headers: str) -> dict[str, float]:
        """Samples by name and label values, e.g. ``kvseal_kv_pages[free]``."""
        from prometheus_client.parser import text_string_to_metric_families

        text = self.client.get("/metrics", headers=headers).raise_for_status().text
        return {
            sample.name + "".join(f"[{value}]" for value in sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def wait_ready(self, timeout_s: float = 20.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while self.client.get("/readyz").status_code != 200:
            assert time.monotonic() < deadline_s, "never ready"
            time.sleep(0.02)

    def wait_until(self, what: Any, timeout_s: float = 5.0) -> None:
        """Until ``what(metrics)`` holds."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            seen = self.metrics()
            if what(seen):
                return
            time.sleep(0.05)
        raise AssertionError(f"it never came: {seen}")


def main() -> None:
    from kvseal.core.config import EngineConfig, FleetConfig, ServeConfig
    from kvseal.core.errors import KVSealError
    from kvseal.serve.server import run_server

    options = json.loads(sys.argv[1])
    serve = {key: Path(value) if key in ("api_keys", "chat_template") else value for key, value in options["serve"].items()}
    try:
        engine = EngineConfig(model=Path(options["model"]), **options["engine"])
        fleet = FleetConfig(**options["fleet"]) if options["fleet"] else None
        config = ServeConfig(engine=engine, fleet=fleet, **{"port": 0, "served_model_name": "demo"} | serve)
        run_server(config, engine_module=options["module"])
    except KVSealError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
