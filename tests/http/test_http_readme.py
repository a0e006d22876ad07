"""What the README shows is what the demo model says: requests and answers are taken from the page, word for word."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest
from servers import ServerProcess

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
EXAMPLE = re.compile(r"\$ curl http://127\.0\.0\.1:8000(/\S+) .*?\\\n  -d '(.*?)'\n(\{.*\})\n")
CURLS = EXAMPLE.findall(README)
PER_REQUEST = ("id", "created", "model", "system_fingerprint")


def test_the_page_has_its_examples() -> None:
    assert [path for path, _, _ in CURLS] == ["/v1/chat/completions", "/v1/completions"]


@pytest.mark.parametrize(("path", "body", "shown"), CURLS, ids=[path for path, _, _ in CURLS])
def test_a_request_gets_the_answer_that_the_page_shows(server: ServerProcess, path: str, body: str, shown: str) -> None:
    response = httpx.post(server.url + path, content=body, headers={"Content-Type": "application/json"}, timeout=60)
    answer, expected = response.json(), json.loads(shown)
    if "error" in expected:
        assert response.status_code == 400
        expected["error"]["details"]["pool_tokens"] = answer["error"]["details"]["pool_tokens"]  # that of this server
    for field in PER_REQUEST:
        answer.pop(field, None), expected.pop(field, None)
    for usage in (answer.get("usage", {}), expected.get("usage", {})):
        usage.pop("prompt_tokens_details", None)  # what was cached depends on who asked before
    assert answer == expected
