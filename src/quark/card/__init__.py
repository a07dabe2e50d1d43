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
from quark.card.fields import MOST_BYTES, MOST_LEVELS, depth

__all__ = [
    "CARD_KEY",
    "CARD_VERSION",
    "MOST_BYTES",
    "MOST_LEVELS",
    "Card",
    "DataFacts",
    "DataKind",
    "depth",
    "differences",
    "platform_facts",
    "relative_path",
    "samples_digest",
]
