"""vLLM's grouping: which layers share a block table, and how many bytes one block id stands for.

Owns the three ways of `get_kv_cache_groups`: one uniform group, packed groups (block-outermost layouts with mixed pages), and groups of
equal size with pages made equal. Source: https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/v1/core/kv_cache_planning.py
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import lcm

from kvseal.core.errors import ConfigError
from kvseal.plan.engines.vllm_specs import CHUNKED, FULL, MAMBA, MLA, SLIDING, SLIDING_MLA, Rules, Spec, promote_local, stride_alignment
from kvseal.plan.units import cdiv, round_up


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Layers that share block ids. `specs` has one entry per layer; padding layers are not listed but are paid for."""

    specs: tuple[Spec, ...]

    @property
    def kind(self) -> str:
        kinds = {spec.kind for spec in self.specs}
        return self.specs[0].kind if len(kinds) == 1 else FULL

    @property
    def layers(self) -> int:
        return len(self.specs)

    @property
    def block_tokens(self) -> int:
        return self.specs[0].block_tokens

    @property
    def page_bytes(self) -> int:
        """All layers of the group together."""
        return sum(spec.page_bytes for spec in self.specs)

    def blocks_per_request(self, tokens: int, rules: Rules) -> int:
        return max(spec.blocks_per_request(tokens, rules) for spec in set(self.specs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """All groups, and what one block of the shared pool costs."""

    groups: tuple[Group, ...]
    bytes_per_block: int
    padding_layers: int
    how: str

    def blocks_per_request(self, tokens: int, rules: Rules) -> int:
        """A request takes blocks from every group."""
        return sum(group.blocks_per_request(tokens, rules) for group in self.groups)


def group_layers(specs: list[Spec], rules: Rules) -> Grouping:
    """The groups of the whole model; bytes per block are those of the poorest pipeline stage. Raises ConfigError when vLLM would fail."""
    if not specs:
        return Grouping(groups=(), bytes_per_block=0, padding_layers=0, how="no attention and no state: nothing to allocate")
    if not rules.hybrid_manager:
        specs = promote_local(specs)
    if uniform(specs):
        group = Group(specs=tuple(specs))
        return Grouping(groups=(group,), bytes_per_block=_one_group_bytes(group, rules), padding_layers=0, how="one group")
    if rules.block_outermost and len({spec.page_bytes for spec in specs}) > 1:
        return _packed(specs, rules)
    return _equal_pages(specs, rules)


_TOGETHER = {FULL: (FULL, MLA), MLA: (FULL, MLA), SLIDING: (SLIDING, SLIDING_MLA)}
"""Kinds that count as one type next to a first layer of that kind."""


def uniform(specs: list[Spec]) -> bool:
    """Whether all layers need the same number of token slots, page size aside. The first layer decides the type."""
    first = specs[0]
    if any(spec.block_tokens != first.block_tokens or spec.kind not in _TOGETHER.get(first.kind, (first.kind,)) for spec in specs):
        return False
    if first.kind == MAMBA:
        return len({(spec.page_bytes, spec.slots) for spec in specs}) == 1
    return len({spec.window_tokens for spec in specs}) == 1


def _stage_bytes(groups: tuple[Group, ...], alignment: int = 1) -> int:
    """Bytes of one block on the stage that holds most: the widest group there, rounded to what the layout asks for."""
    stages = {spec.stage for group in groups for spec in group.specs}
    widest = max(max(sum(spec.page_bytes for spec in group.specs if spec.stage == stage) for group in groups) for stage in stages)
    return round_up(widest, alignment)


def _one_group_bytes(group: Group, rules: Rules) -> int:
    alignment = lcm(*(stride_alignment(spec) for spec in set(group.specs))) if rules.block_outermost else 1
    return _stage_bytes((group,), alignment)


def _equal_pages(specs: list[Spec], rules: Rules) -> Grouping:
    """Pages made equal, then buckets split into groups of one size."""
    unified = _unify_pages(specs)
    if unified is None:
        return _full_allocation(specs, rules)
    specs = unified
    buckets: dict[Spec, list[Spec]] = {}
    for spec in specs:
        buckets.setdefault(spec, []).append(spec)
    sizes = [len(bucket) for bucket in buckets.values()]
    size = max(sizes) if max(sizes) < 1.5 * min(sizes) else min(sizes)
    groups: list[Group] = []
    padding = 0
    for bucket in buckets.values():
        count = cdiv(len(bucket), size)
        padding += -len(bucket) % size
        groups.extend(Group(specs=tuple(bucket[i::count])) for i in range(count))
    widest = max(group.layers for group in groups)
    return Grouping(
        groups=tuple(groups),
        bytes_per_block=_stage_bytes(tuple(groups)),
        padding_layers=padding,
        how=f"{len(groups)} groups of up to {widest} layers",
    )


def _unify_pages(specs: list[Spec]) -> list[Spec] | None:
    """The largest page wins: smaller pages get more tokens, or padding when they do not divide it. None: latent rows cannot be padded."""
    largest = max(spec.page_bytes for spec in specs)
    unified: list[Spec] = []
    for spec in specs:
        if spec.page_bytes == largest or spec.kind == MAMBA:
            unified.append(replace(spec, page_bytes=largest))
        elif largest % spec.page_bytes == 0:
            unified.append(replace(spec, page_bytes=largest, block_tokens=spec.block_tokens * (largest // spec.page_bytes)))
        elif spec.kind != MLA:
            unified.append(replace(spec, page_bytes=largest))
        else:
            return None
    return unified


def _full_allocation(specs: list[Spec], rules: Rules) -> Grouping:
    """Latent layers beside windows of another page size: the windows are allocated in full, in one group."""
    kinds = {spec.kind for spec in specs}
    promoted = promote_local(specs)
    if MLA in kinds and SLIDING in kinds and not kinds & {SLIDING_MLA, CHUNKED} and uniform(promoted):
        group = Group(specs=tuple(promoted))
        how = "one group: windows allocated in full, since their pages cannot be made equal to the latent rows'"
        return Grouping(groups=(group,), bytes_per_block=_one_group_bytes(group, rules), padding_layers=0, how=how)
    pages = ", ".join(f"{spec.detail or spec.kind} {spec.page_bytes:,} B" for spec in dict.fromkeys(specs))
    raise ConfigError(f"vLLM cannot make these pages equal in a layer-outermost layout: {pages}; use --kv-layout BLHNC")


def _packed(specs: list[Spec], rules: Rules) -> Grouping:
    """Mixed pages side by side in one block: uniform buckets, split by the repeats of the layer pattern."""
    buckets: list[list[Spec]] = []
    for spec in specs:
        for bucket in buckets:
            if uniform([*dict.fromkeys(bucket), spec]):
                bucket.append(spec)
                break
        else:
            buckets.append([spec])
    by_page = [Counter(spec.page_bytes for spec in bucket) for bucket in buckets]
    balanced = [len(set(pages.values())) == 1 for pages in by_page]
    repeats = _repeats_per_group(by_page, balanced)
    counts = [cdiv(max(pages.values()), repeats) if repeats and even else 1 for pages, even in zip(by_page, balanced, strict=True)]
    state = [bucket[0].kind == MAMBA or (not repeats and bucket[0].kind in (SLIDING, SLIDING_MLA)) for bucket in buckets]
    anchor = max(
        sum(cdiv(count, len(bucket) if is_state else n) * page for page, count in pages.items())
        for bucket, pages, n, is_state in zip(buckets, by_page, counts, state, strict=True)
    )
    groups: list[Group] = []
    for bucket, n, is_state in zip(buckets, counts, state, strict=True):
        if is_state and anchor:
            per_block = max(anchor // bucket[0].page_bytes, 1)
            n = max(n, cdiv(len(bucket), per_block))
        groups.extend(_split(bucket, n))
    widest = _stage_bytes(tuple(groups))
    if rules.packed_repeats and repeats:
        widest = max(widest, repeats * max(sum(pages) for pages in by_page))
    alignment = lcm(*(stride_alignment(spec) for spec in set(specs)))
    return Grouping(
        groups=tuple(groups), bytes_per_block=round_up(widest, alignment), padding_layers=0, how=f"{len(groups)} packed groups, mixed pages"
    )


def _split(bucket: list[Spec], count: int) -> list[Group]:
    """Whole repeats of the pattern (one layer of each page size) go to the groups in turn."""
    if count == 1:
        return [Group(specs=tuple(bucket))]
    columns: dict[int, list[Spec]] = {}
    for spec in bucket:
        columns.setdefault(spec.page_bytes, []).append(spec)
    if len({len(column) for column in columns.values()}) > 1 or len(bucket) // len(columns) < count:
        raise ConfigError("vLLM cannot pack layers of these page sizes in a block-outermost layout; use --kv-layout LBNHC")
    repeats = list(zip(*columns.values(), strict=True))
    return [Group(specs=tuple(spec for repeat in repeats[i::count] for spec in repeat)) for i in range(count)]


def _repeats_per_group(by_page: list[Counter[int]], balanced: list[bool]) -> int | None:
    """The number of repeats that wastes least; only when some bucket has several page sizes in equal numbers."""
    least = max((max(pages.values()) for pages, even in zip(by_page, balanced, strict=True) if even and len(pages) > 1), default=0)
    if not least:
        return None
    counts = [max(pages.values()) for pages, even in zip(by_page, balanced, strict=True) if even]
    best, best_padding = least, -1
    for candidate in range(least, max(counts) + 1):
        padding = sum(-count % candidate for count in counts)
        if best_padding < 0 or padding <= best_padding:
            best, best_padding = candidate, padding
    return best
