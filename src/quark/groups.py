"""Groups of things that share one decision."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

Member = TypeVar("Member", bound=Hashable)


class Groups(Generic[Member]):
    """
    >>> groups = Groups()
    >>> groups.unite(["a", "b"])
    >>> groups.unite(["c", "b"])
    >>> groups.members("a"), groups.members("x")
    (['c', 'a', 'b'], ['x'])
    """

    def __init__(self) -> None:
        self._group: dict[Member, list[Member]] = {}

    def unite(self, members: Iterable[Member]) -> None:
        """Merge the groups of all these members."""
        together = list(dict.fromkeys(each for member in members for each in self.members(member)))
        for member in together:
            self._group[member] = together

    def members(self, member: Member) -> list[Member]:
        """Return the group of a member, which may be the member alone."""
        return self._group.get(member, [member])
