"""Which layer is of which kind: full, sliding, chunked, linear, ...

Owns every public way of saying it: `layer_types`, 0/1 patterns, "LLLG" strings, every-Nth numbers, per-layer windows, and the rule of
the class when the file is silent (`class_defaults.json`). Never guesses a kind that it has not heard of.
"""

from __future__ import annotations

from typing import Any

from kvseal.core.errors import ModelCorrupt, ModelUnsupported
from kvseal.plan.fields import Fields

WORDS = {
    "full": ("full_attention", "full", "attention", "global", "global_attention", "full_attn", "*", "softmax_attention", "gqa"),
    "sliding": ("sliding_attention", "sliding", "sliding_window", "local", "local_attention", "swa", "sliding_window_attention"),
    "chunked": ("chunked_attention", "chunked", "chunked_local_attention"),
    "linear": ("linear_attention", "linear", "kda", "gdn", "mamba", "mamba2", "mamba1", "recurrent", "m", "lightning_attention"),
    "conv": ("conv", "short_conv"),
    "hybrid": ("hybrid", "h", "g"),
    "hybrid_sliding": ("hybrid_sliding",),
    "indexed": ("indexed_attention", "sparse_attention"),
    "none": ("moe", "mlp", "-", "e", "ffn", "no_op"),
}
_KIND_OF = {word: kind for kind, words in WORDS.items() for word in words}

ALL_SLIDE = {"mistral", "mixtral", "phi3", "phimoe", "phi4_multimodal", "starcoder2", "qwen3_moe", "ministral", "phi3_v"}
"""Classes in which every layer slides when `sliding_window` is set and nothing else is said."""
FLAGGED = {"qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_5_omni_text"}
"""Classes in which `use_sliding_window` (default false) rules."""
WINDOW_KEYS = ("sliding_window", "sliding_window_size", "attention_window_size", "window_size", "local_attention_window")


def word_kind(word: object, where: str) -> str:
    """The kind behind one word of a layer list."""
    if isinstance(word, str) and word.lower() in _KIND_OF:
        return _KIND_OF[word.lower()]
    raise ModelUnsupported(
        f"{where} holds {str(word)[:40]!r}, a layer kind that this planner does not know; "
        f"it knows {', '.join(words[0] for words in WORDS.values())}"
    )


def layer_kinds(fields: Fields, layers: int, model_type: str, rule: dict[str, Any] | None) -> list[str]:
    """One kind per layer. `rule` is the class's own pattern, used when the file has none."""
    for read in (_from_layer_types, _from_block_list, _from_binary_pattern, _from_pattern_string, _from_every_nth):
        kinds = read(fields, layers, model_type)
        if kinds is not None:
            return kinds
    return _from_class_rule(fields, layers, model_type, rule)


def _exactly(values: list[str], layers: int, fields: Fields, key: str) -> list[str]:
    """A list may be longer than the model by its draft (MTP) layers, never shorter."""
    if len(values) < layers:
        raise ModelCorrupt(f"{fields.where}{key} has {len(values)} entries for {layers} layers")
    if len(values) > layers:
        fields.notes.append(f"{fields.where}{key} has {len(values) - layers} entries more than layers: taken for draft (MTP) layers")
    fields.rules.append(f"layer kinds: {fields.where}{key}")
    return values[:layers]


def _from_layer_types(fields: Fields, layers: int, model_type: str) -> list[str] | None:
    words = fields.sequence("layer_types")
    if words is None:
        return None
    return _exactly([word_kind(word, f"{fields.where}layer_types") for word in words], layers, fields, "layer_types")


def _from_block_list(fields: Fields, layers: int, model_type: str) -> list[str] | None:
    """`layers_block_type` and the repeated `block_types` of Griffin-like models."""
    words = fields.sequence("layers_block_type")
    if words is not None:
        return _exactly([word_kind(word, "layers_block_type") for word in words], layers, fields, "layers_block_type")
    words = fields.sequence("block_types") or (fields.value("block_types") if "block_types" in fields.class_defaults else None)
    if not words:
        return None
    kinds = [word_kind(word, "block_types") for word in words]
    fields.rules.append(f"layer kinds: {fields.where}block_types, repeated")
    return [kinds[i % len(kinds)] for i in range(layers)]


def _from_binary_pattern(fields: Fields, layers: int, model_type: str) -> list[str] | None:
    """`hybrid_layer_pattern` (MiMo): 0 is full, 1 slides. `attn_type_list` (MiniMax-Text-01): 1 is full, 0 is lightning."""
    for key, zero, one in (("hybrid_layer_pattern", "full", "sliding"), ("attn_type_list", "linear", "full")):
        bits = fields.sequence(key)
        if bits is None:
            continue
        if any(bit not in (0, 1) or isinstance(bit, bool) for bit in bits):
            raise ModelCorrupt(f"{fields.where}{key} must hold 0 and 1 only")
        return _exactly([one if bit else zero for bit in bits], layers, fields, key)
    return None


def _from_pattern_string(fields: Fields, layers: int, model_type: str) -> list[str] | None:
    pattern = fields.raw.get("sliding_window_pattern")
    if isinstance(pattern, list):
        words = [
            ("sliding" if word else "full") if isinstance(word, bool) else word_kind(word, "sliding_window_pattern") for word in pattern
        ]
        if not words:
            return None
        fields.rules.append("layer kinds: sliding_window_pattern, repeated")
        return [words[i % len(words)] for i in range(layers)]
    if not isinstance(pattern, str):
        return None
    kinds = {"L": "sliding", "G": "full", "S": "sliding", "F": "full"}
    if not pattern or any(letter not in kinds for letter in pattern.upper()):
        raise ModelCorrupt(f"{fields.where}sliding_window_pattern is {pattern[:40]!r}; it must be made of L (local) and G (global)")
    fields.rules.append("layer kinds: sliding_window_pattern string, repeated")
    letters = pattern.upper()
    return [kinds[letters[i % len(letters)]] for i in range(layers)]


def _from_every_nth(fields: Fields, layers: int, model_type: str) -> list[str] | None:
    """Numbers that mean 'every Nth layer is global' (or full, among linear layers)."""
    for key, other, phase in (
        ("sliding_window_pattern", "sliding", -1),
        ("_sliding_window_pattern", "sliding", -1),
        ("global_attn_every_n_layers", "sliding", 0 if model_type.startswith("modernbert") else -1),
        ("full_attention_interval", "linear", -1),
        ("layer_group_size", "linear", -1),
    ):
        if not fields.has(key) and not (key == "full_attention_interval" and key in fields.class_defaults):
            continue
        every = fields.integer(key, limit="layers", minimum=0)
        if every == 0:
            continue
        fields.rules.append(f"layer kinds: every {every}th layer is full ({key})")
        return ["full" if i % every == phase % every else other for i in range(layers)]
    if fields.has("attn_layer_period") or "attn_layer_period" in fields.class_defaults:
        period = fields.integer("attn_layer_period", limit="layers")
        offset = fields.integer("attn_layer_offset", limit="layers", minimum=0)
        fields.rules.append(f"layer kinds: attention every {period} layers from {offset}")
        return ["full" if i % period == offset else "linear" for i in range(layers)]
    return None


def _from_class_rule(fields: Fields, layers: int, model_type: str, rule: dict[str, Any] | None) -> list[str]:
    window = raw_window(fields)
    if model_type in FLAGGED or "use_sliding_window" in fields.raw:
        if not fields.boolean("use_sliding_window") or window is None:
            fields.rules.append("layer kinds: all full (use_sliding_window is false)")
            return ["full"] * layers
        start = fields.integer("max_window_layers", limit="layers", fallback=0, minimum=0)
        fields.rules.append(f"layer kinds: layers from {start} slide (max_window_layers)")
        return ["sliding" if i >= start else "full" for i in range(layers)]
    if isinstance(window, list):
        fields.rules.append("layer kinds: per-layer window list")
        return ["sliding"] * layers
    if rule:
        pattern = [word_kind(word, "class rule") for word in rule["pattern"]]
        kinds = [pattern[i % len(pattern)] for i in range(layers)]
        if "last" in rule and layers:
            kinds[-1] = word_kind(rule["last"], "class rule")
        if "sliding" in kinds and window is None and window_is_off(fields):
            fields.rules.append("layer kinds: all full (the window is null)")
            return ["full" if kind == "sliding" else kind for kind in kinds]
        if len(set(kinds)) > 1:
            fields.note_default("layer_types", f"{rule['pattern']} repeated" if len(rule["pattern"]) < 9 else "class pattern")
            fields.rules.append("layer kinds: rule of the class (no list in the file)")
        return kinds
    if model_type in ALL_SLIDE and window is not None:
        fields.rules.append("layer kinds: every layer slides (sliding_window is set)")
        return ["sliding"] * layers
    if window is not None:
        fields.notes.append(f"{model_type} does not read its sliding window: every layer is full")
    fields.rules.append("layer kinds: all full")
    return ["full"] * layers


def window_is_off(fields: Fields) -> bool:
    """A window key that is there and null, 0 or -1 switches the window off; an absent one means the class default."""
    return any(key in fields.raw and fields.raw[key] in (None, 0, -1, False) for key in WINDOW_KEYS)


def raw_window(fields: Fields) -> int | list[Any] | None:
    """The window in tokens, a per-layer list of windows, or None."""
    for key in ("interleaved_sliding_window", *WINDOW_KEYS):
        value = fields.raw.get(key)
        if isinstance(value, list):
            return value
        if value is not None and value not in (0, -1, False):
            return fields.check(key, value, "tokens")
        if key in fields.raw:
            return None
    value = fields.value(*WINDOW_KEYS)
    return value if isinstance(value, int) else None


def windows_per_layer(fields: Fields, kinds: list[str]) -> list[int | None]:
    """The window of each sliding layer (None elsewhere). A list of windows goes layer by layer, or repeats."""
    window = raw_window(fields)
    if isinstance(window, list):
        if not window or (len(window) < len(kinds) and len(kinds) % len(window)):
            raise ModelCorrupt(f"{fields.where}sliding_window is a list of {len(window)} for {len(kinds)} layers")
        values = [window[i % len(window)] for i in range(len(kinds))]
        return [None if v in (None, 0, -1, False) else fields.check("sliding_window", v, "tokens") for v in values]
    if window is None and any("sliding" in kind for kind in kinds):
        raise ModelCorrupt(f"the config has sliding layers and no window; it needs {fields.where}sliding_window")
    return [window if "sliding" in kind else None for kind in kinds]
