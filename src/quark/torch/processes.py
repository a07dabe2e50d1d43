"""Several processes that each see a part of the data, as torchrun starts them."""

from __future__ import annotations

from typing import TypeVar

from torch import distributed

Value = TypeVar("Value")


def gathered(value: Value) -> list[Value]:
    """The values of all processes in the order of their ranks; of this one alone where there are no others.

    >>> gathered(3)
    [3]
    """
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        return [value]
    found: list[Value | None] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, value)
    return [each for each in found if each is not None]
