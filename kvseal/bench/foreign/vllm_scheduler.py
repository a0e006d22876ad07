"""What vLLM's own scheduler costs, measured in vLLM's own Python: started by ``kvseal bench scheduler --vllm-python PATH``.

Owns the null-model measurement of figure 7 for vLLM V1: its `Scheduler` and KV cache manager, everybody decodes, outputs made up outside
the measured time; page ends included. Imports nothing of KVSeal. First line out: {"version": ...} or {"error": why}. Then a number of
running requests in, {"value": microseconds of CPU per running request and step} out, one JSON value a line.
"""

import contextlib
import dataclasses
import importlib
import inspect
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PROMPT_TOKENS = 64
STEPS, ROUNDS = 64, 9
BLOCK_TOKENS = 16
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 1,
    "num_hidden_layers": 1,
    "num_key_value_heads": 1,
    "vocab_size": 50_304,
    "max_position_embeddings": 8_192,
    "torch_dtype": "float32",
}


def known(function: Any, **arguments: Any) -> dict[str, Any]:
    """Those that this version takes: names come and go between releases."""
    takes = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in takes}


class Rig:
    """One scheduler and its requests."""

    def __init__(self, running: int, folder: Path) -> None:
        v1 = "vllm.v1"
        config = importlib.import_module("vllm.config")
        interface = importlib.import_module(f"{v1}.kv_cache_interface")
        utils = importlib.import_module(f"{v1}.core.kv_cache_utils")
        torch = importlib.import_module("torch")
        tokens = PROMPT_TOKENS + (ROUNDS + 2) * STEPS
        blocks = running * (tokens // BLOCK_TOKENS + 2) + 1
        model = config.ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=8_192)
        scheduling = config.SchedulerConfig(
            **known(
                config.SchedulerConfig, max_num_seqs=running, max_num_batched_tokens=max(8_192, running * PROMPT_TOKENS),
                max_model_len=8_192, enable_chunked_prefill=True, is_encoder_decoder=False, async_scheduling=False,
            )
        )  # fmt: skip
        cache = config.CacheConfig(**known(config.CacheConfig, block_size=BLOCK_TOKENS, enable_prefix_caching=True))
        cache.num_gpu_blocks = blocks
        whole = config.VllmConfig(model_config=model, scheduler_config=scheduling, cache_config=cache)
        spec_class = interface.FullAttentionSpec
        spec = spec_class(**known(spec_class, block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=4, dtype=torch.float32, use_mla=False))
        groups = interface.KVCacheConfig(
            num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[interface.KVCacheGroupSpec(["layer"], spec)]
        )
        if hasattr(groups, "hash_block_size"):
            groups.hash_block_size = BLOCK_TOKENS
        scheduler_class = importlib.import_module(f"{v1}.core.sched.scheduler").Scheduler
        structured = importlib.import_module(f"{v1}.structured_output").StructuredOutputManager(whole)
        self.scheduler = scheduler_class(
            **known(
                scheduler_class, vllm_config=whole, kv_cache_config=groups, structured_output_manager=structured, block_size=BLOCK_TOKENS,
                hash_block_size=BLOCK_TOKENS, log_stats=False,
            )
        )  # fmt: skip
        self._output_class = importlib.import_module(f"{v1}.outputs").ModelRunnerOutput
        hash_function = importlib.import_module("vllm.utils.hashing").sha256
        with contextlib.suppress(AttributeError):
            utils.init_none_hash(hash_function)
        hasher = utils.get_request_block_hasher(BLOCK_TOKENS, hash_function)
        for index in range(running):
            self.scheduler.add_request(self._request(index, tokens, hasher))
        self._step()
        if len(self.scheduler.running) != running:
            raise RuntimeError(f"{len(self.scheduler.running)} of {running} requests run")

    def _request(self, index: int, tokens: int, hasher: Any) -> Any:
        request_class = importlib.import_module("vllm.v1.request").Request
        sampling = importlib.import_module("vllm").SamplingParams(ignore_eos=True, max_tokens=tokens, temperature=0.0)
        prompt = [(index * 7_919 + at) % 50_000 for at in range(PROMPT_TOKENS)]
        return request_class(
            **known(
                request_class, request_id=f"request-{index}", prompt_token_ids=prompt, sampling_params=sampling, pooling_params=None,
                eos_token_id=None, block_hasher=hasher,
            )
        )  # fmt: skip

    def _step(self) -> int:
        """CPU nanoseconds of one step, the made-up output not counted."""
        began = time.thread_time_ns()
        scheduled = self.scheduler.schedule()
        spent = time.thread_time_ns() - began
        ids = list(scheduled.num_scheduled_tokens)
        fields: dict[str, Any] = {
            "req_ids": ids,
            "req_id_to_index": {request_id: index for index, request_id in enumerate(ids)},
            "sampled_token_ids": [[7]] * len(ids),
            "logprobs": None,
            "prompt_logprobs_dict": {},
            "pooler_output": [],
        }
        takes = {field.name for field in dataclasses.fields(self._output_class)}
        output = self._output_class(**{name: value for name, value in fields.items() if name in takes})
        began = time.thread_time_ns()
        self.scheduler.update_from_output(scheduled, output)
        return spent + time.thread_time_ns() - began

    def round(self) -> int:
        return sum(self._step() for _ in range(STEPS))


class Rigs:
    """One for each number of running requests, made anew when its requests are about to end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rigs: dict[int, tuple[Rig, int]] = {}

    def measure(self, running: int) -> float:
        """Microseconds per request and step of one round; the first round of a rig does not count."""
        rig, left = self._rigs.pop(running, (None, 0))
        if rig is None:
            rig, left = Rig(running, self._folder), ROUNDS
            rig.round()
        spent = rig.round()
        if left > 1:
            self._rigs[running] = (rig, left - 1)
        return spent / running / STEPS / 1_000


def main() -> None:
    with tempfile.TemporaryDirectory() as made, contextlib.redirect_stdout(sys.stderr):
        folder = Path(made)
        (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
        rigs = Rigs(folder)
        try:
            version = importlib.import_module("vllm").__version__
            rigs.measure(4)
        except Exception as error:
            answer({"error": f"vLLM's scheduler does not run there: {type(error).__name__}: {str(error)[:200]}"})
            raise
        answer({"version": version})
        for line in sys.stdin:
            answer({"value": rigs.measure(json.loads(line))})


def answer(said: dict[str, Any]) -> None:
    print(json.dumps(said), file=sys.__stdout__, flush=True)


if __name__ == "__main__":
    main()
