"""A hash of gigabytes that takes little longer than reading them: for weights in files of their own.

SHA-256 of them would take longer than everything else that is done with a large model. What is asked of the hash is
that other weights have another one. So the bytes, as rows of 64-bit numbers, run through as many polynomials at once,

    lane = lane * MULTIPLIER + row        modulo 2^64,

and SHA-256 of the lanes, the bytes left over and the number of bytes is the hash. The multiplier is odd, so that no
power of it is lost: weights that differ in one number, or in the order of rows, have different lanes. It is no
protection against somebody who wants two files to have the same.
"""

from __future__ import annotations

import hashlib

import numpy as np

MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # the golden ratio's bits, as good as any odd number
ROW_BYTES = 1 << 16  # lanes and row stay in the processor's cache


class Fingerprint:
    """Takes in bytes as they come; where they were cut does not matter.

    >>> whole, parts = Fingerprint(), Fingerprint()
    >>> whole.update(b"abcd")
    >>> parts.update(b"ab")
    >>> parts.update(b"cd")
    >>> whole.digest() == parts.digest()
    True
    """

    def __init__(self) -> None:
        self._lanes = np.zeros(ROW_BYTES // 8, np.uint64)
        self._rest = b""  # less than a row
        self._size = 0

    def update(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        self._size += len(view)
        if self._rest:
            missing = ROW_BYTES - len(self._rest)
            self._rest += bytes(view[:missing])
            view = view[missing:]
            if len(self._rest) == ROW_BYTES:
                self._take(self._rest)
                self._rest = b""
        whole = len(view) // ROW_BYTES * ROW_BYTES
        self._take(view[:whole])
        self._rest += bytes(view[whole:])

    def digest(self) -> bytes:
        """32 bytes."""
        return hashlib.sha256(self._lanes.astype("<u8").tobytes() + self._rest + b"%d" % self._size).digest()

    def _take(self, rows: bytes | memoryview) -> None:
        for row in np.frombuffer(rows, "<u8").reshape(-1, self._lanes.size):
            np.multiply(self._lanes, MULTIPLIER, out=self._lanes)
            np.add(self._lanes, row, out=self._lanes)
