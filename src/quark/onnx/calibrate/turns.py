"""Threads that take turns: number 0, then 1, then 2, and so on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class TurnsBroken(Exception):  # noqa: N818 - not a mistake of its own: another thread has failed
    """Some other thread will not take its turn."""


class Turns:
    """`with turns.take(i):` waits until all numbers below i have had their turn. After `give_up` nobody waits."""

    def __init__(self) -> None:
        self._next = 0
        self._is_broken = False
        self._changed = threading.Condition()

    @contextmanager
    def take(self, number: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._next == number or self._is_broken)
            if self._is_broken:
                raise TurnsBroken
        yield
        with self._changed:
            self._next += 1
            self._changed.notify_all()

    def give_up(self) -> None:
        with self._changed:
            self._is_broken = True
            self._changed.notify_all()
