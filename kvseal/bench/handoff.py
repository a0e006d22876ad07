"""What a hand-off adds to the time to the first token: a prefill and a decode node against one node. ``kvseal bench handoff``.

Owns the pairs: both servers run all the time, with one thread for each engine, and each pair sends one fresh prompt to both, one after the
other, first to the one and next time first to the other. Fresh means under a salt of its own, so nothing is reused. Answers must be equal,
and every prompt of the split must have been handed over, or there is no score. Measured by a client, over HTTP, from the request to the
first token of its stream.
"""

from __future__ import annotations

import json
import random
import time
from statistics import median
from typing import Any, NamedTuple

import httpx

from kvseal.bench.place.served import ServerFailed, servers
from kvseal.bench.suite.board import Entry, Result, Side, Target, missing
from kvseal.bench.suite.command import Context, benchmark_main
from kvseal.node.models import resolve_model

FIGURE = "handoff"
PROMPT_TOKENS = (300, 950, 2_850)
OUTPUT_TOKENS = 6
ROUNDS, QUICK_ROUNDS = 3, 1
"""For each of the pairs asked for: the noise of a small machine is many times what is looked for."""
POOL_TOKENS = 16_384
LITTLE = Target(high=1.05)
SPLIT, ONE = "split", "one node"


class Heard(NamedTuple):
    first_s: float
    second_s: float
    """From the first token to the second: what a hand-off that is not ready would delay."""
    text: str


class Failed(Exception):
    """No figure is worth quoting: the reason."""


class Ways:
    """The two servers, and what is asked of them."""

    def __init__(self, urls: dict[str, str], chance: random.Random, client: httpx.Client) -> None:
        self._urls = urls
        self._chance = chance
        self._client = client
        self._models: dict[str, Any] = {name: self._client.get(f"{url}/v1/models").json()["data"][0] for name, url in urls.items()}

    @property
    def context_tokens(self) -> int:
        return min(int(model["max_model_len"]) for model in self._models.values())

    def pair(self, prompt_tokens: int, first: str) -> dict[str, Heard]:
        """The same fresh prompt, to `first` first."""
        prompt = [self._chance.randrange(100, 30_000) for _ in range(prompt_tokens)]
        names = sorted(self._urls, key=lambda name: name != first)
        heard = {name: self._ask(name, prompt) for name in names}
        if len({one.text for one in heard.values()}) != 1:
            raise Failed(f"the two ways answer a prompt of {prompt_tokens} tokens differently")
        return heard

    def handed_over(self) -> int:
        """Prompts so far that one node computed and the other did not compute again."""
        lines = self._client.get(f"{self._urls[SPLIT]}/metrics").text.splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return int(float(values["kvseal_handoff_split_total"]) - float(values["kvseal_handoff_recomputed_total"]))

    def _ask(self, name: str, prompt: list[int]) -> Heard:
        body = {
            "model": self._models[name]["id"],
            "prompt": prompt,
            "max_tokens": OUTPUT_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "cache_salt": f"{self._chance.getrandbits(64):x}",
        }
        began_s, times_s, text = time.perf_counter(), list[float](), ""
        with self._client.stream("POST", f"{self._urls[name]}/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                raise Failed(f"{name}: status {answer.status_code}")
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line[6:])
                    if not chunk.get("choices"):
                        raise Failed(f"{name}: an error in the stream")
                    times_s.append(time.perf_counter() - began_s)
                    text += chunk["choices"][0]["text"]
        if len(times_s) < 2:
            raise Failed(f"{name}: {len(times_s)} chunks for {OUTPUT_TOKENS} tokens")
        return Heard(times_s[0], times_s[1] - times_s[0], text)


def measure(context: Context, ways: Ways) -> list[Entry]:
    entries = []
    ways.pair(PROMPT_TOKENS[0], SPLIT)  # whatever happens once happens here
    for prompt_tokens in PROMPT_TOKENS:
        name = f"time to first token, {SPLIT} / {ONE}, {prompt_tokens}-token prompt"
        if prompt_tokens + OUTPUT_TOKENS > ways.context_tokens:
            entries.append(missing(FIGURE, name, f"the model's context is {ways.context_tokens} tokens", LITTLE))
            continue
        before, heard = ways.handed_over(), list[dict[str, Heard]]()
        for pair in range(context.pairs * (QUICK_ROUNDS if context.quick else ROUNDS)):
            context.say(f"{prompt_tokens} tokens, pair {pair + 1}")
            heard.append(ways.pair(prompt_tokens, ONE if pair % 2 else SPLIT))
        handed = ways.handed_over() - before
        if handed != len(heard):
            raise Failed(f"{handed} of {len(heard)} prompts of {prompt_tokens} tokens were handed over; the others were computed again")
        entries.append(entry_of(name, heard))
    return entries


def entry_of(name: str, heard: list[dict[str, Heard]]) -> Entry:
    def side(which: str) -> Side:
        return Side(which, "ms", tuple(1e3 * pair[which].first_s for pair in heard))

    seconds = {which: 1e3 * median(pair[which].second_s for pair in heard) for which in (SPLIT, ONE)}
    note = f"outputs equal, every prompt handed over; second token {seconds[SPLIT]:.1f} ms after the first, {seconds[ONE]:.1f} on {ONE}"
    return Entry(figure=FIGURE, name=name, a=side(SPLIT), b=side(ONE), target=LITTLE, note=note)


def run(context: Context) -> Result:
    serve = ["kvseal", "serve", str(resolve_model(context.model)), "--threads", "1", "--pool-tokens", str(POOL_TOKENS)]
    settings = {"threads": "1 for each engine", "transport": "shared memory", "pool_tokens": str(POOL_TOKENS)}
    try:
        with servers([[*serve, "--prefill", "1", "--decode", "1"], serve]) as urls, httpx.Client(timeout=300.0) as client:
            entries = measure(context, Ways(dict(zip((SPLIT, ONE), urls, strict=True)), random.Random(5), client))
    except (Failed, ServerFailed, httpx.HTTPError) as failed:
        entries = [missing(FIGURE, f"time to first token, {SPLIT} / {ONE}", str(failed) or type(failed).__name__, LITTLE)]
    return Result(name="handoff", title="What a hand-off adds to the first token", entries=entries, settings=settings)


def main() -> int:
    return benchmark_main("handoff", __doc__ or "", run)


if __name__ == "__main__":
    raise SystemExit(main())
