"""Source: where a memory comes from, which its reader must share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Source:
    """Where a memory comes from; only a compressor with an equal source can read it.

    Args:
        method: the compressor's `method`, such as "icae" or "gistpool".
        carrier: "embedding" or "kv".
        options: the method's arguments that change its memories, by name; JSON values.
        chunk: chunk size L in tokens.
        memory_tokens: memory tokens M per chunk, without BOS.
        structure: the base model's shape, `gistkit.hf.structure`.
        cache_width: numbers in the model's full KV cache per token, over all layers.
    """

    method: str
    carrier: str
    options: Mapping[str, Any] = field(hash=False)
    chunk: int
    memory_tokens: int
    structure: str
    cache_width: int

    @property
    def ratio(self) -> float:
        """Context tokens per memory token, L / M."""
        return self.chunk / self.memory_tokens

    @property
    def layout(self) -> str | None:
        """The position layout, "dpl", "upl", "cpl" or "epl", of a method that has these."""
        return self.options.get("layout")

    @property
    def consistent(self) -> bool:
        """Whether the decoder's tokens keep the position IDs of the uncompressed sequence (CPL, EPL)."""
        return self.layout in ("cpl", "epl")

    @property
    def numbered_through(self) -> bool:
        """Whether cached keys have the position IDs of the context through all its chunks (UPL, EPL)."""
        return self.carrier == "kv" and self.layout in ("upl", "epl")

    @staticmethod
    def of(content: Mapping[str, Any]) -> Source:
        """The source that a file describes."""
        source = Source(**content)
        if any(type(getattr(source, name)) is not kind for name, kind in _KINDS.items()):
            raise ValueError(f"{source}")
        return source


_KINDS = {field.name: {"str": str, "int": int}.get(str(field.type), dict) for field in fields(Source)}
