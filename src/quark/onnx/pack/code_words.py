"""Small codes in whole bytes, and tables of the numbers that bytes of them stand for."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from quark.formats.element_codes import decode_elements
from quark.formats.spec import ElementFormat, IntFormat
from quark.onnx.pack.block_codes import Bytes


def filled(codes: Bytes, multiple: int) -> Bytes:
    """The codes, flat, and zeros up to a multiple."""
    flat = np.ascontiguousarray(codes).reshape(-1)
    return np.pad(flat, (0, -flat.size % multiple)) if flat.size % multiple else flat


def joined(codes: Bytes, bits: int) -> Bytes:
    """Bytes of codes of that many bits, a divisor of 8; an even number of bytes."""
    each = 8 // bits
    parts = filled(codes, 2 * each).reshape(-1, each)
    result = np.zeros(len(parts), np.uint8)
    for index in range(each):
        result |= parts[:, index] << np.uint8(bits * index)
    return result


def parted(stored: Bytes, bits: int) -> Bytes:
    """What `joined` joined, and what it filled up with."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return np.asarray((stored[:, None] >> shifts) & np.uint8((1 << bits) - 1), np.uint8).reshape(-1)


@lru_cache(maxsize=32)
def integers(element: IntFormat) -> NDArray[np.int8]:
    """Every code as an integer. -0 becomes 0: whoever has it must not come here."""
    codes = np.arange(1 << element.bits, dtype=np.uint8)
    numbers = decode_elements(element, codes, np.dtype(np.float32)) * np.float32(2.0**element.fraction_bits)
    return np.asarray(numbers, np.int8)


def numbers_of_bytes(element: ElementFormat, bits: int) -> NDArray[np.float32]:
    """The numbers in every byte: [256, 8 / bits]. A code that is no number is never looked up, and written as 0."""
    codes = parted(np.arange(256, dtype=np.uint8), bits).reshape(256, -1)
    numbers = np.asarray(decode_elements(element, codes, np.dtype(np.float32)), np.float32)
    return np.asarray(np.where(np.isfinite(numbers), numbers, 0), np.float32)


def magnitudes_of_bytes(element: ElementFormat, bits: int) -> NDArray[np.float32]:
    """The same where bytes hold magnitudes, filled up to that many bits."""
    codes = parted(np.arange(256, dtype=np.uint8), bits).reshape(256, -1) & np.uint8((1 << (element.bits - 1)) - 1)
    return np.asarray(decode_elements(element, codes, np.dtype(np.float32)), np.float32)


def words_to_codes(words: NDArray[np.uint16], bits: int) -> Bytes:
    """The codes in words of 12 bits, the first one lowest: [words, 12 / bits]."""
    shifts = np.arange(0, 12, bits, dtype=np.uint16)
    return np.asarray((words[:, None] >> shifts) & np.uint16((1 << bits) - 1), np.uint8)


def numbers_of_words(element: ElementFormat) -> NDArray[np.float32]:
    """The numbers in every word of 12 bits: [4096, 12 / bits]."""
    codes = words_to_codes(np.arange(4096, dtype=np.uint16), element.bits)
    return np.asarray(decode_elements(element, codes, np.dtype(np.float32)), np.float32)


def signs_of_bytes() -> NDArray[np.float32]:
    """-1 for every bit that is set, else 1: [256, 8]."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return np.asarray(np.where(bits == 1, -1, 1), np.float32)
