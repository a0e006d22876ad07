"""What the golden fixtures cover: small models by family and feature, and the demo model's prompts. Data of make_golden_fixtures.py."""

from __future__ import annotations

LLAMA_31 = "meta-llama__Meta-Llama-3.1-8B"
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 8, "vocab_size": 96}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
PHI_LONG = {
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0, 1.05, 1.3],
        "long_factor": [1.1, 2.5, 7.0],
    },
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 48,
    "max_position_embeddings": 256,
}

# name -> (a real config's name, or a model type whose class defaults serve), overrides, dtype, prompt tokens
CASES: dict[str, tuple[str, dict[str, object], str, int]] = {
    "llama2": ("meta-llama__Llama-2-7b-hf", {"num_key_value_heads": 8}, "fp16", 40),
    "llama2-gqa": ("meta-llama__Llama-2-70b-hf", {"num_key_value_heads": 2}, "fp32", 40),
    "llama3": (
        LLAMA_31,
        {
            "num_key_value_heads": 2,
            "rope_theta": 500.0,
            "max_position_embeddings": 512,
            "rope_scaling": {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
                "rope_type": "llama3",
            },
        },
        "bf16",
        120,
    ),
    "llama-tied": (LLAMA_31, {"num_key_value_heads": 4, "rope_scaling": None, "tie_word_embeddings": True}, "bf16", 40),
    "llama-linear": (
        "meta-llama__Llama-2-7b-hf",
        {"num_key_value_heads": 4, "rope_scaling": {"type": "linear", "factor": 4.0}, "max_position_embeddings": 128},
        "fp32",
        100,
    ),
    "llama-yarn-new-keys": (
        "llama",
        {
            "num_key_value_heads": 4,
            "max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 24.0,
                "beta_slow": 2.0,
                "attention_factor": 1.2,
            },
        },
        "fp32",
        100,
    ),
    "llama-biases": (LLAMA_31, {"num_key_value_heads": 4, "rope_scaling": None, "attention_bias": True, "mlp_bias": True}, "fp32", 40),
    "llama-wide-heads": (LLAMA_31, {"num_key_value_heads": 2, "rope_scaling": None, "head_dim": 16}, "fp32", 40),
    "smollm2": ("llama", {"num_key_value_heads": 2, "num_attention_heads": 6, "hidden_size": 48, "tie_word_embeddings": True}, "bf16", 40),
    "mistral-v0.1": ("mistral", {"num_key_value_heads": 2, "sliding_window": 16, "max_position_embeddings": 256}, "bf16", 60),
    "mistral-v0.3": ("mistralai__Mistral-7B-Instruct-v0.3", {"num_key_value_heads": 2}, "bf16", 40),
    "qwen2": ("Qwen__Qwen2.5-7B-Instruct", {"num_key_value_heads": 2}, "bf16", 40),
    "qwen2-yarn": (
        "Qwen__Qwen2.5-7B-Instruct",
        {
            "num_key_value_heads": 4,
            "max_position_embeddings": 32,
            "rope_theta": 1000.0,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        },
        "fp32",
        100,
    ),
    "qwen2-windows": (
        "Qwen__Qwen2.5-72B",
        {"num_key_value_heads": 4, "use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1},
        "fp32",
        60,
    ),
    "qwen3": ("Qwen__Qwen3-8B", {"num_key_value_heads": 2, "head_dim": 16}, "bf16", 40),
    "qwen3-layer-types": (
        "Qwen__Qwen3-32B",
        {
            "num_key_value_heads": 4,
            "head_dim": 24,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 10,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        "fp32",
        50,
    ),
    "smollm3": ("smollm3", {"num_key_value_heads": 2, "num_hidden_layers": 5}, "bf16", 40),
    "granite": (
        "granite",
        {
            "num_key_value_heads": 2,
            "embedding_multiplier": 6.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.35,
            "logits_scaling": 3.0,
            "tie_word_embeddings": True,
        },
        "bf16",
        40,
    ),
    "phi3-window": ("phi3", {"num_key_value_heads": 8, "sliding_window": 15, "max_position_embeddings": 128}, "bf16", 50),
    "phi4": ("microsoft__phi-4", {"num_key_value_heads": 2}, "bf16", 40),
    "phi3-longrope-short": ("phi3", {"num_key_value_heads": 4, **PHI_LONG}, "fp32", 40),
    "phi3-longrope-long": ("phi3", {"num_key_value_heads": 4, **PHI_LONG}, "fp32", 90),
}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "phi3": "Phi3ForCausalLM",
}
POSITIONS = 10

PROMPTS = [
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Name three colours.",
    "How many days are in a week?",
    "Explain photosynthesis in simple words.",
    "Give me a short recipe for pancakes.",
    "What does a compiler do?",
    "Tell me a fact about elephants.",
    "Translate 'good morning' into Spanish.",
    "Why is the sky blue?",
    "List four European countries.",
    "Write a haiku about autumn.",
    "What is the boiling point of water?",
    "Who wrote Romeo and Juliet?",
    "Describe a sunrise in the mountains.",
    "What is 12 plus 30?",
    "How do bees make honey?",
    "Give two tips for better sleep.",
    "What is machine learning?",
    "Write a polite email declining a meeting.",
    "What is a haiku?",
    "Name the largest planet.",
    "How does a bicycle work?",
]
TEXTS = 20
EOS = 2
NEW_TOKENS = 48
SMALLEST_GAP = 2e-3
"""A text with a closer choice on its way is left out: float32 sums in another order may decide it differently."""
