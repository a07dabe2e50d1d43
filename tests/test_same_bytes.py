"""Every preset still makes the same file of the same network; see `same_bytes.py`, which also records them."""

import pytest
from same_bytes import cases, recorded, surroundings

KNOWN = recorded()
CASES = dict(cases())


@pytest.mark.skipif(not KNOWN, reason=f"nothing is recorded for {surroundings()}")
@pytest.mark.parametrize("name", CASES)
def test_the_file_is_the_same_as_before(name):
    assert CASES[name]() == KNOWN[name]
