"""Which family a config belongs to. Owns the registry by architecture class and model type, and the class defaults.

An architecture that is not here is refused by name. The defaults come from `data/class_defaults.json`: facts read from the configuration
classes of transformers, never numbers of a particular checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from kvseal.plan.families import gqa, hybrid, mla
from kvseal.plan.families.gqa import Builder

BUILDERS: dict[str, Builder] = {
    "gqa": gqa.build,
    "chunked": gqa.build_llama4,
    "shared": gqa.build_shared,
    "cross": gqa.build_cross,
    "nas": gqa.build_nas,
    "split_heads": gqa.build_mimo,
    "sparse_index": gqa.build_sparse_index,
    "encoder_decoder": gqa.build_encoder_decoder,
    "gpt_neo": gqa.build_gpt_neo,
    "mla": mla.build,
    "mla_twice": mla.build_longcat,
    "dsv4": mla.build_v4,
    "gdn": hybrid.build_gdn,
    "olmo_hybrid": hybrid.build_olmo_hybrid,
    "mamba1_hybrid": hybrid.build_mamba1_hybrid,
    "mamba2_hybrid": hybrid.build_mamba2_hybrid,
    "nemotron_h": hybrid.build_nemotron_h,
    "short_conv": hybrid.build_lfm2,
    "lightning": hybrid.build_lightning,
    "rg_lru": hybrid.build_recurrent_gemma,
    "kda": hybrid.build_kda,
    "state_only": hybrid.build_pure_state,
}

_MODEL_TYPES = {
    "gqa": """afmoe apertus arcee aria_text aria arctic aya_vision baichuan baichuan2 bailing_moe
    bailing_moe_v2 biogpt bitnet bloom chameleon chatglm codegen cohere
    cohere2 cohere2_moe cohere2_vision command_r cwm dbrx deepseek diffllama doge dots1 emu3 ernie4_5 ernie4_5_moe ernie4_5_vl_moe
    ernie4_5_vl_moe_text exaone exaone4 exaone4_5 exaone_moe falcon flex_olmo fuyu gemma gemma2 gemma3 gemma3_text glm glm4 glm46v glm4_moe
    glm4v glm4v_moe glm4v_moe_text glm4v_text glm_ocr glm_ocr_text got_ocr2 gpt2 gpt-sw3 gpt_bigcode gpt_neox gpt_neox_japanese gpt_oss gptj
    granite granitemoe granitemoeshared granite_swa granitemoe_swa grok-1 helium hunyuan hunyuan_v1_dense hunyuan_v1_moe hyperclovax
    idefics2 idefics3 internlm internlm2 internlm3 internvl internvl_chat interns1 jais jais2 janus llama llava llava_next
    llava_next_video llava_onevision mimo minicpm minicpmv minimax_m2 ministral ministral3 mistral mistral3 mixtral modernbert-decoder
    molmo mpt nanochat nemotron olmo olmo2 olmo3 olmoe opt orion ovis2 paddleocr_vl paddleocr_vl_text paligemma perception_lm persimmon phi
    phi3 phi3_v phi4_multimodal phi4mm phimoe pixtral qwen qwen2 qwen2_5_omni qwen2_5_omni_text qwen2_5_omni_thinker qwen2_5_vl
    qwen2_5_vl_text qwen2_moe qwen2_vl qwen2_vl_text qwen2_audio qwen3 qwen3_moe qwen3_omni_moe qwen3_omni_moe_text qwen3_omni_moe_thinker
    qwen3_vl qwen3_vl_moe qwen3_vl_moe_text qwen3_vl_text refinedweb refinedwebmodel seed_oss shieldgemma2 smollm3 smolvlm solar
    solar_open stablelm starcoder2 step3_text step3_vl step3p5 step3p7 telechat2 vaultgemma
    video_llava vipllava voxtral xglm xverse yi openelm""",
    "chunked": "llama4 llama4_text",
    "shared": "gemma3n gemma3n_text gemma4 gemma4_text gemma4_unified gemma4_unified_text",
    "cross": "mllama mllama_text_model",
    "nas": "nemotron-nas deci",
    "split_heads": "mimo_v2_flash mimo_v2",
    "sparse_index": "minimax_m3 minimax_m3_vl minimax_m3_vl_text",
    "encoder_decoder": "t5 mt5 umt5 bart mbart whisper pegasus marian",
    "gpt_neo": "gpt_neo",
    "mla": """deepseek_v2 deepseek_v3 deepseek_v32 deepseek_vl_v2 glm4_moe_lite glm_moe_dsa kimi_k2 kimi_k25 kimi_vl minicpm3 mistral4
    mistral_large4 mistral_large4_text youtu axk1 pangu_ultra_moe openpangu""",
    "mla_twice": "longcat_flash",
    "dsv4": "deepseek_v4",
    "gdn": "qwen3_next qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text",
    "olmo_hybrid": "olmo_hybrid",
    "mamba1_hybrid": "jamba zamba",
    "mamba2_hybrid": "bamba falcon_h1 granitemoehybrid zamba2",
    "nemotron_h": "nemotron_h nemotron_h_omni nemotron_h_nano_vl_v2",
    "short_conv": "lfm2 lfm2_moe lfm2_vl",
    "lightning": "minimax minimax_text_01",
    "rg_lru": "recurrent_gemma",
    "kda": "kimi_linear kimi_k3 glm5_next glm5_next_text",
    "state_only": "mamba mamba2 falcon_mamba codestral_mamba",
}
FAMILY_OF = {model_type: family for family, text in _MODEL_TYPES.items() for model_type in text.split()}

_STEMS = {
    "llama": "llama", "mistral": "mistral", "rw": "refinedwebmodel", "decilm": "nemotron-nas", "nemotronnas": "nemotron-nas",
    "nemotronh": "nemotron_h", "qwen": "qwen", "qwenlmhead": "qwen",
    "gpt2lmhead": "gpt2", "gptneox": "gpt_neox", "gptbigcode": "gpt_bigcode",
    "gptoss": "gpt_oss", "internlm": "internlm", "internlm2": "internlm2", "internlm3": "internlm3", "chatglm": "chatglm",
    "baichuan": "baichuan", "mimov2flash": "mimo_v2_flash", "mimov2": "mimo_v2", "minimaxm2": "minimax_m2", "minimaxm3": "minimax_m3",
    "minimaxm3sparse": "minimax_m3", "minimaxtext01": "minimax_text_01", "minimaxm1": "minimax_text_01", "step3p7flash": "step3p7",
    "step3p5": "step3p5", "step3p7": "step3p7", "kimik25": "kimi_k25", "kimi_k25": "kimi_k25", "kimik3": "kimi_k3", "kimik2": "kimi_k2",
    "kimilinear": "kimi_linear", "kimivl": "kimi_vl", "deepseekvlv2": "deepseek_vl_v2", "exaone": "exaone", "commandr": "command_r",
    "phi3small": "phi3", "phi3v": "phi3_v", "phi4mm": "phi4mm", "grok1": "grok-1", "yi": "yi", "solar": "solar", "orion": "orion",
    "xverse": "xverse", "arctic": "arctic", "minicpm": "minicpm", "minicpmv": "minicpmv", "telechat2": "telechat2", "telechat": "telechat2",
    "jais": "jais", "mpt": "mpt", "openelm": "openelm", "internvlchat": "internvl_chat", "interns1": "interns1", "mimo": "mimo",
    "hunyuan": "hunyuan", "molmo": "molmo", "cohere": "cohere", "qwen2audio": "qwen2_audio", "pangu ultra moe": "pangu_ultra_moe",
    "grok1model": "grok-1",
}  # fmt: skip
_SUFFIXES = ("forcausallm", "forconditionalgeneration", "lmheadmodel", "forsequenceclassification", "fortokenclassification", "model", "lm")


@cache
def class_table() -> Mapping[str, Any]:
    """The facts file, read once."""
    path = Path(__file__).parent / "data" / "class_defaults.json"
    table: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))["classes"]
    return table


@cache
def _by_stem() -> Mapping[str, str]:
    """Architecture stem to model type: the transformers classes, then names that only remote code uses."""
    stems: dict[str, str] = {}
    for name, entry in class_table().items():
        if not entry.get("architecture"):
            continue
        stem = _stem(entry["architecture"])
        if stem not in stems or name.replace("_", "").replace("-", "") == stem:
            stems[stem] = name
    own = {name.replace("_", "").replace("-", ""): name for name in FAMILY_OF}
    return {**own, **stems, **_STEMS}


def _stem(architecture: str) -> str:
    text = architecture.lower()
    for suffix in _SUFFIXES:
        if text.endswith(suffix) and len(text) > len(suffix):
            return text.removesuffix(suffix).rstrip("_")
    return text


def model_type_of(architecture: str) -> str | None:
    """The model type behind an architecture class name, or None when the class is unknown."""
    return _by_stem().get(_stem(architecture))


def class_defaults(model_type: str) -> Mapping[str, Any]:
    entry = class_table().get(model_type)
    return entry["defaults"] if entry else {}


def class_entry(model_type: str) -> Mapping[str, Any]:
    """The whole entry, following `text_model_type` of a composite class."""
    table = class_table()
    entry: Mapping[str, Any] = table.get(model_type, {})
    inner = entry.get("text_model_type")
    return table.get(inner, entry) if inner else entry


_VLLM = "https://github.com/vllm-project/vllm/blob/v0.33.0/vllm"
_SOURCES = {
    "mla": f"{_VLLM}/model_executor/models/deepseek_v2.py",
    "mla_twice": f"{_VLLM}/model_executor/models/deepseek_v2.py",
    "dsv4": f"{_VLLM}/models/deepseek_v4/attention.py",
    "sparse_index": f"{_VLLM}/models/minimax_m3/common/indexer.py",
}
_STATE_FAMILIES = (
    "gdn",
    "olmo_hybrid",
    "mamba1_hybrid",
    "mamba2_hybrid",
    "nemotron_h",
    "short_conv",
    "lightning",
    "rg_lru",
    "kda",
    "state_only",
)


def family_source(family: str) -> str:
    """Where the family's rule can be read."""
    if family in _STATE_FAMILIES:
        return f"{_VLLM}/model_executor/layers/mamba/mamba_utils.py"
    return _SOURCES.get(family, f"{_VLLM}/v1/kv_cache_interface.py")
