"""Insert: decisions become quantizers in the graph. Nothing here decides."""

from quark.torch.insert.insert import insert, insert_repeated

__all__ = ["insert", "insert_repeated"]
