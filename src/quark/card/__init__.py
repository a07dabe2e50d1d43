"""The reproducibility card: everything that is needed to make a quantized file again."""

from quark.card.card import (
    CARD_KEY,
    CARD_VERSION,
    Card,
    DataFacts,
    DataKind,
    differences,
    platform_facts,
    relative_path,
    samples_digest,
)

__all__ = [
    "CARD_KEY",
    "CARD_VERSION",
    "Card",
    "DataFacts",
    "DataKind",
    "differences",
    "platform_facts",
    "relative_path",
    "samples_digest",
]
