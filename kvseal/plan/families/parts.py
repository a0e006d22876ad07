"""What a family hands back. A type of its own, so that families need not know the model around it."""

from __future__ import annotations

from dataclasses import dataclass

from kvseal.plan.shape import Layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """Layers in order; draft layers outside the model's count; what must divide by tensor parallel."""

    layers: list[Layer]
    drafts: list[Layer]
    query_heads: int
    dsa: bool = False
    head_split: int = 0
