"""Every preset still makes the same file of the same network; see `same_bytes.py`, which also records them."""

import pytest
from same_bytes import cases, is_finetuned, recorded, surroundings

KNOWN = recorded()
CASES = dict(cases())
QUICK = ("INT8_CNN_ACCURATE", "XINT8_ADAROUND", "MXFP4E2M1_ADAQUANT", "BF16_MIXED_BFP16_ADAQUANT")  # of the finetuned


def marked(name):
    is_slow = is_finetuned(name) and not name.endswith(QUICK)
    return pytest.param(name, marks=pytest.mark.slow) if is_slow else name


@pytest.mark.skipif(not KNOWN, reason=f"nothing is recorded for {surroundings()}")
@pytest.mark.parametrize("name", [marked(name) for name in CASES])
def test_the_file_is_the_same_as_before(name):
    if name not in KNOWN:  # files changed on purpose, and nobody recorded them on such a processor since
        pytest.skip(f"no digest of '{name}' is recorded for {surroundings()}")
    assert CASES[name]() == KNOWN[name]
