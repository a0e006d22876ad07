"""Every benchmark by its name on the command line, with what it measures in a line. Measures nothing and imports none of them."""

from __future__ import annotations

BENCHMARKS = {
    "accuracy": "what a format of weights or of the KV cache costs in accuracy: perplexity, divergence, agreement",
    "admission": "how full the pool is kept, and at what price, by an event model (figures 1 and 2)",
    "all": "all that count for the scoreboard, one after the other",
    "batch": "how full the pool is kept on the real engine, and what it brings (figures 1 and 2)",
    "board": "measures nothing: reports made again from stored runs",
    "decode": "whole decode steps against the memory's speed (figure 9)",
    "fit": "the latency model of this machine, for kvseal place",
    "growth": "how costs grow with requests, lengths and pages",
    "handoff": "what a hand-off adds to the time to the first token",
    "hits": "how much of what could be reused is reused (figure 4)",
    "kernels": "how fast the native kernels are",
    "linear": "linear kernels against what a core can do (figure 13)",
    "lookup": "what it costs to find and to enter a prefix (figure 8)",
    "noreuse": "what the prefix cache costs where it finds nothing (figure 6)",
    "peers": "KVSeal beside every other CPU engine that runs here",
    "prefix": "what the prefix cache is worth on real work (figure 3)",
    "safety": "what seal checks and digests cost, against a twin without them (figure 15)",
    "scheduler": "what the control plane costs per running request and step (figure 7)",
    "simulator": "whether the placement simulator tells the truth (figure 12)",
    "split": "whether splitting prefill from decode pays on this machine (figure 11)",
    "stall": "whether a long prompt makes others wait (figure 10)",
    "start": "time to the first token of a fresh server, and its memory (figure 16)",
    "step": "what a step costs beyond its kernels (figure 9)",
    "transfer": "how fast sealed pages move between two processes",
}

BENCHMARKS_HELP = "\n".join(
    ["Runs one benchmark and prints its figures:", "", *(f"  {name:10} {what}" for name, what in BENCHMARKS.items())]
)
