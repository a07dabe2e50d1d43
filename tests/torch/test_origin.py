"""The digest of a state: the same for equal states in any process, another one for every other state."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quark.torch.origin import state_digest


class Anything:
    """Its repr has its address."""


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(3),
        lambda: torch.zeros(0, 3),
        lambda: torch.ones(2, dtype=torch.complex64),
        lambda: torch.tensor(True),
        lambda: None,
        lambda: {"scale": torch.ones(2), "names": ["a", 1.5]},
        lambda: {"object": Anything()},
    ],
)
def test_equal_states_have_equal_digests(make: Any) -> None:
    kept = [make() for _ in range(2)]  # both are alive, so that no object has the address of another
    first, second = (state_digest({"x": each}) for each in kept)
    assert first == second
    assert first != state_digest({"y": kept[0]})


def test_everything_counts() -> None:
    states: list[dict[str, Any]] = [
        {"x": torch.zeros(2)},
        {"x": torch.zeros(1, 2)},
        {"x": torch.zeros(2, dtype=torch.bfloat16)},
        {"x": torch.tensor([0.0, -0.0])},
        {"x": [torch.zeros(2)]},
        {"x": {"0": torch.zeros(2)}},
        {"x": {"0": torch.ones(2)}},
        {"x": [0.0, 0.0]},
        {"x": "0.0"},
        {"x": None},
    ]
    assert len({state_digest(state) for state in states}) == len(states)
