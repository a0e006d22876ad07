"""Computes tests/golden/fixtures with Hugging Face transformers, in float32: what KVSeal must reproduce.

Run in an environment with the `[golden]` extra::

    python tools/make_golden_fixtures.py small --configs FOLDER     # a folder of real config.json files, named ORG__MODEL.json
    python tools/make_golden_fixtures.py demo --model FILE.gguf
    python tools/make_golden_fixtures.py quants

`small` scales real configurations down (few layers, small sizes), fills them with reproducible random weights and stores each case's
logits. `demo` stores greedy continuations and logits of the demo model; its tensors are read with the `gguf` package, so that no code of
KVSeal stands between the file and the expectation. `quants` stores blocks of every GGUF type and their values by the `gguf` package.
The versions used are stored with the numbers.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from golden.small_models import FIXTURES, random_tensor, random_tokens, rounded
from golden_cases import ARCHITECTURES, CASES, EOS, NEW_TOKENS, POSITIONS, PROMPTS, SMALL, SMALLEST_GAP, SPECIAL, TEXTS


def base_config(source: str, configs: Path | None) -> dict[str, object]:
    if source in ARCHITECTURES:
        defaults = AutoConfig.for_model(source).to_dict()
        keep = ("model_type", "hidden_act", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings")
        return {key: defaults[key] for key in keep} | {"architectures": [ARCHITECTURES[source]]}
    if configs is None:
        raise SystemExit("--configs is needed: the folder of real configurations")
    loaded: dict[str, object] = json.loads((configs / f"{source}.json").read_text())
    return loaded


def scaled_config(name: str, configs: Path | None) -> dict[str, object]:
    source, overrides, _, _ = CASES[name]
    return base_config(source, configs) | SMALL | SPECIAL | overrides


def small_model(config: Mapping[str, object], tensors: list[tuple[str, list[int]]] | None, seed: int, dtype: str) -> torch.nn.Module:
    """The model of transformers with the reproducible weights; `tensors` None: its own list of parameters."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        parsed = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(parsed, attn_implementation="eager", dtype=torch.float32).eval()
    for name, shape in tensors or tensor_list(model):
        values = rounded(random_tensor(seed, name, tuple(shape)), dtype)
        model.get_parameter(name).data.copy_(torch.from_numpy(values))
    model.tie_weights()
    return model


def tensor_list(model: torch.nn.Module) -> list[tuple[str, list[int]]]:
    return [(name, list(parameter.shape)) for name, parameter in model.named_parameters()]


def logits_of(model: torch.nn.Module, tokens: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float().numpy()


def make_small(configs: Path | None) -> None:
    cases, logits = [], {}
    for seed, (name, (source, _, dtype, count)) in enumerate(CASES.items(), start=1):
        config = scaled_config(name, configs)
        model = small_model(config, None, seed, dtype)
        tensors = tensor_list(model)
        tokens = random_tokens(seed, count, int(str(config["vocab_size"])))
        positions = sorted({round(i * (count - 1) / (POSITIONS - 1)) for i in range(POSITIONS)})
        rows = logits_of(model, tokens)[positions]
        print(f"{name:22} logits {rows.std():.2f} +- , largest {np.abs(rows).max():.1f}")
        logits[name] = rows
        cases.append(
            {
                "name": name,
                "source": source,
                "config": config,
                "dtype": dtype,
                "seed": seed,
                "tensors": tensors,
                "tokens": tokens,
                "positions": positions,
            }
        )
    FIXTURES.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(FIXTURES / "logits.npz", **logits)
    text = ",\n".join(json.dumps(case, sort_keys=True) for case in cases)
    (FIXTURES / "cases.json").write_text(f'{{"versions": {json.dumps(versions())},\n"cases": [\n{text}\n]}}\n')


def demo_model(path: Path) -> torch.nn.Module:
    """The demo model in transformers, float32, dequantised by the `gguf` package."""
    import gguf

    reader = gguf.GGUFReader(path)

    def value(key: str) -> object:
        return reader.fields[f"llama.{key}"].contents()

    config = LlamaConfig(
        vocab_size=value("vocab_size"),
        hidden_size=value("embedding_length"),
        intermediate_size=value("feed_forward_length"),
        num_hidden_layers=value("block_count"),
        num_attention_heads=value("attention.head_count"),
        num_key_value_heads=value("attention.head_count_kv"),
        max_position_embeddings=value("context_length"),
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": value("rope.freq_base")},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    parts = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    model = LlamaForCausalLM(config).eval()
    for tensor in reader.tensors:
        stem = tensor.name.removesuffix(".weight")
        if stem not in names:
            _, layer, part = stem.split(".")
            stem = f"model.layers.{layer}.{parts[part]}"
        else:
            stem = names[stem]
        values = np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if stem.endswith(("q_proj", "k_proj")):  # stored as (head, pair, half) for interleaved rotation
            dims = config.head_dim
            values = values.reshape(-1, dims // 2, 2, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
        model.get_parameter(f"{stem}.weight").data.copy_(torch.from_numpy(values))
    model.tie_weights()
    return model


def prompt_text(prompt: str) -> str:
    """The demo model's own chat template with its default system message."""
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    return f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"


def greedy(model: torch.nn.Module, prompts: list[list[int]], count: int) -> list[tuple[list[int], float]]:
    """The continuations of all prompts, padded on the left, and the smallest gap between best and second-best logit on the way of each."""
    longest = max(map(len, prompts))
    tokens = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    outputs: list[list[int]] = [[] for _ in prompts]
    gaps, cache = [float("inf")] * len(prompts), None
    with torch.no_grad():
        for index in range(count):
            step = model(tokens, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1)
            best = step.logits[:, -1].topk(2)
            for row, output in enumerate(outputs):
                if not output or output[-1] != EOS:
                    output.append(int(best.indices[row, 0]))
                    gaps[row] = min(gaps[row], float(best.values[row, 0] - best.values[row, 1]))
            print(f"token {index + 1} of {count}", flush=True)
            cache, tokens, positions = step.past_key_values, best.indices[:, :1], positions[:, -1:] + 1
            mask = torch.cat([mask, torch.ones_like(tokens)], dim=-1)
    return list(zip(outputs, gaps, strict=True))


def make_demo(path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    model = demo_model(path)
    prompts = [[int(x) for x in tokenizer(prompt_text(prompt), add_special_tokens=False)["input_ids"]] for prompt in PROMPTS]
    texts, logits = [], {}
    for prompt, tokens, (output, gap) in zip(PROMPTS, prompts, greedy(model, prompts, NEW_TOKENS), strict=True):
        print(f"gap {gap:.4f} {tokenizer.decode(output)[:90]!r}")
        if gap >= SMALLEST_GAP and len(texts) < TEXTS:
            texts.append({"prompt": prompt, "tokens": tokens, "output": output, "smallest_gap": round(gap, 5)})
    for index, text in enumerate(texts[:3]):
        rows = logits_of(model, text["tokens"] + text["output"])
        chosen = sorted({0, 1, len(text["tokens"]) // 2, len(text["tokens"]) - 1, len(rows) - 1})
        logits[f"positions_{index}"] = np.array(chosen, dtype=np.int32)
        logits[f"logits_{index}"] = rows[chosen][:, ::16].astype(np.float32)
    np.savez_compressed(FIXTURES / "demo_logits.npz", **logits)
    body = ",\n".join(json.dumps(text) for text in texts)
    (FIXTURES / "demo_greedy.json").write_text(f'{{"versions": {json.dumps(versions())},\n"texts": [\n{body}\n]}}\n')


# type -> (bytes per block, offsets of its fp16 fields, which get sane values)
QUANTS = {
    "Q4_0": (18, (0,)),
    "Q4_1": (20, (0, 2)),
    "Q5_0": (22, (0,)),
    "Q5_1": (24, (0, 2)),
    "Q8_0": (34, (0,)),
    "Q4_K": (144, (0, 2)),
    "Q5_K": (176, (0, 2)),
    "Q6_K": (210, (208,)),
}
QUANT_BLOCKS = 6


def make_quants() -> None:
    import gguf

    source, stored = np.random.RandomState(7), {}
    for name, (size, halves) in QUANTS.items():
        raw = source.randint(0, 256, size=(QUANT_BLOCKS, size)).astype(np.uint8)
        for at in halves:
            raw[:, at : at + 2] = source.standard_normal((QUANT_BLOCKS, 1)).astype("<f2").view(np.uint8)
        stored[f"{name}_raw"] = raw.reshape(-1)
        stored[f"{name}_values"] = gguf.dequantize(raw.reshape(1, -1), gguf.GGMLQuantizationType[name]).reshape(-1).astype(np.float32)
    np.savez_compressed(FIXTURES / "quants.npz", **stored)


def versions() -> dict[str, str]:
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("small", "demo", "quants"))
    parser.add_argument("--configs", type=Path, help="folder of real configurations (small)")
    parser.add_argument("--model", type=Path, help="the demo model's GGUF file (demo)")
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.what == "small":
        make_small(options.configs)
    elif options.what == "quants":
        make_quants()
    elif options.model is None:
        parser.error("demo needs --model")
    else:
        make_demo(options.model.resolve())


if __name__ == "__main__":
    main()
