"""The script that a peer's own Python runs: one engine, driven over standard input and output.

Owns one class per Python API. Runs under ``python -P worker.py ENGINE --model PATH --threads N ...`` in an environment that has no KVSeal
(but for KVSeal's own line of the table). One line of JSON in, ``{"prompts": [[ids]], "output_tokens": n}``; one line out,
``{"counts": [n], "digest": hash of the tokens}`` or ``{"error": why}``; the first line out says which versions these are. Whatever a
library prints goes to standard error. Greedy, and the end of the text is ignored, so that all do the same work.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any, Protocol

Tokens = list[int]


class Engine(Protocol):
    def about(self) -> dict[str, str]: ...

    def generate(self, prompts: list[Tokens], output_tokens: int) -> list[Sequence[int]]:
        """The new tokens of each prompt, all computed together."""


class KVSeal:
    """`kvseal.LLM`, the engine in this process."""

    def __init__(self, options: argparse.Namespace) -> None:
        import kvseal

        self._sampling = kvseal.SamplingParams
        settings = {"weights": options.weights, "pool_tokens": options.requests * options.tokens, "threads": options.threads}
        self._llm = kvseal.LLM(options.model, max_running=max(64, options.requests), **settings)
        self._about = {"version": kvseal.__version__, "KV": "fp16"}

    def about(self) -> dict[str, str]:
        return self._about

    def generate(self, prompts: list[Tokens], output_tokens: int) -> list[Sequence[int]]:
        sampling = self._sampling(temperature=0.0, min_tokens=output_tokens)
        return [answer.tokens for answer in self._llm.generate(prompts, sampling, max_tokens=output_tokens)]


class OpenVINO:
    """openvino_genai's continuous batching: paged, prefixes cached. K and V are 8-bit unless --kv says otherwise (its own default)."""

    def __init__(self, options: argparse.Namespace) -> None:
        import openvino  # type: ignore[import-not-found]
        import openvino_genai  # type: ignore[import-not-found]

        self._openvino, self._genai = openvino, openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 2  # GiB
        scheduler.max_num_seqs = options.requests
        scheduler.max_num_batched_tokens = 2_048
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = True
        settings = {
            "INFERENCE_NUM_THREADS": options.threads,
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "f32",
        }
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(options.model, scheduler, "CPU", settings)

    def about(self) -> dict[str, str]:
        return {"version": str(self._genai.__version__).split("-")[0], "KV": "u8"}

    def generate(self, prompts: list[Tokens], output_tokens: int) -> list[Sequence[int]]:
        import numpy as np

        config = self._genai.GenerationConfig()
        config.max_new_tokens = output_tokens
        config.ignore_eos = True
        config.do_sample = False
        config.apply_chat_template = False
        inputs = [self._openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        return [answer.m_generation_ids[0] for answer in self._pipeline.generate(inputs, [config] * len(inputs))]


class OnnxRuntime:
    """onnxruntime_genai's generator: one static batch of equal lengths, no cache of prefixes."""

    def __init__(self, options: argparse.Namespace) -> None:
        import onnxruntime_genai  # type: ignore[import-not-found]

        self._genai = onnxruntime_genai
        config = onnxruntime_genai.Config(options.model)
        session = {"intra_op_num_threads": options.threads, "inter_op_num_threads": 1}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
        self._model = onnxruntime_genai.Model(config)

    def about(self) -> dict[str, str]:
        return {"version": str(self._genai.__version__), "KV": "fp32"}

    def generate(self, prompts: list[Tokens], output_tokens: int) -> list[Sequence[int]]:
        import numpy as np

        length = len(prompts[0])
        whole = length + output_tokens
        parameters = self._genai.GeneratorParams(self._model)
        parameters.set_search_options(do_sample=False, max_length=whole, min_length=whole, batch_size=len(prompts))
        generator = self._genai.Generator(self._model, parameters)
        generator.append_tokens(np.array(prompts, dtype=np.int32))
        while not generator.is_done():
            generator.generate_next_token()
        return [[int(token) for token in generator.get_sequence(row)[length:]] for row in range(len(prompts))]


class Transformers:
    """Hugging Face transformers in float32: `generate` on one padded batch, or its continuous batching."""

    def __init__(self, options: argparse.Namespace, *, continuous: bool) -> None:
        import torch  # type: ignore[import-not-found]
        import transformers  # type: ignore[import-not-found]

        torch.set_num_threads(options.threads)
        transformers.logging.set_verbosity_error()
        self._torch, self._transformers, self._continuous = torch, transformers, continuous
        load = transformers.AutoModelForCausalLM.from_pretrained
        self._model = load(options.model, dtype=torch.float32, attn_implementation="sdpa").eval()

    def about(self) -> dict[str, str]:
        return {"version": f"{self._transformers.__version__}, torch {self._torch.__version__}", "KV": "fp32"}

    def generate(self, prompts: list[Tokens], output_tokens: int) -> list[Sequence[int]]:
        with self._torch.inference_mode():
            return self._batched(prompts, output_tokens) if self._continuous else self._padded(prompts, output_tokens)

    def _padded(self, prompts: list[Tokens], output_tokens: int) -> list[Sequence[int]]:
        inputs = self._torch.tensor(prompts)
        found = self._model.generate(
            input_ids=inputs,
            attention_mask=self._torch.ones_like(inputs),
            min_new_tokens=output_tokens,
            max_new_tokens=output_tokens,
            do_sample=False,
            pad_token_id=2,
            eos_token_id=None,
        )
        answers: list[Sequence[int]] = found[:, inputs.shape[1] :].tolist()
        return answers

    def _batched(self, prompts: list[Tokens], output_tokens: int) -> list[Sequence[int]]:
        from transformers.generation import ContinuousBatchingConfig  # type: ignore[import-not-found]

        config = self._transformers.GenerationConfig(max_new_tokens=output_tokens, do_sample=False, eos_token_id=-1, pad_token_id=2)
        batching = ContinuousBatchingConfig(max_batch_tokens=2_048, num_blocks=256, page_size=256, use_cuda_graph=False)
        answers = self._model.generate_batch(
            inputs=prompts, generation_config=config, continuous_batching_config=batching, progress_bar=False, persistent_manager=True
        )
        return [answer.generated_tokens for answer in answers.values()]


def make(name: str, options: argparse.Namespace) -> Engine:
    if name == "kvseal":
        return KVSeal(options)
    if name == "openvino":
        return OpenVINO(options)
    if name == "onnxruntime":
        return OnnxRuntime(options)
    return Transformers(options, continuous=name == "transformers-continuous")


def serve(engine: Engine, requests: Any, answers: Any) -> None:
    """Answers each line until the input ends. A request that fails is answered with its error and is the last: its engine may be broken."""
    print(json.dumps(engine.about()), file=answers, flush=True)
    for line in requests:
        asked = json.loads(line)
        try:
            found = [list(map(int, answer)) for answer in engine.generate(asked["prompts"], asked["output_tokens"])]
        except Exception as error:
            print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=answers, flush=True)
            raise
        digest = hashlib.sha256(json.dumps(found).encode()).hexdigest()
        print(json.dumps({"counts": [len(answer) for answer in found], "digest": digest}), file=answers, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="One engine over standard input and output; for kvseal bench peers.")
    engines = ("kvseal", "openvino", "onnxruntime", "transformers", "transformers-continuous")
    parser.add_argument("engine", choices=engines)
    parser.add_argument("--model", required=True, help="what this engine loads")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--requests", type=int, default=32, help="most at once")
    parser.add_argument("--tokens", type=int, default=1_536, help="longest prompt and answer together")
    parser.add_argument("--weights", default="auto", help="KVSeal's own option")
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # Libraries print; the answers keep the old descriptor.
    serve(make(options.engine, options), sys.stdin, answers)


if __name__ == "__main__":
    main()
