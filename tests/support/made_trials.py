"""Trials with made-up figures."""

from __future__ import annotations

from hypothesis import strategies as st

from quark.search import Limits, Measurement, Stage, Trial


def trial(name, size=100, drop=1.0, latency=1.0, stage=Stage.DIRECT, **figures):
    return Trial(name, "XINT8", stage, measured=Measurement(size, drop, latency, **figures), seconds=1.0)


def failed(name, reason="no such operator"):
    return Trial(name, "XINT8", Stage.DIRECT, failure=reason)


FIGURES = st.builds(
    Measurement,
    size_bytes=st.integers(1, 20),
    drop=st.sampled_from([-1.0, 0.0, 0.5, 1.0, 5.0, 100.0]),
    latency_ms=st.sampled_from([0.1, 1.0, 2.0, 10.0]),
    kl=st.sampled_from([None, 0.0, 0.1, float("inf")]),
)


@st.composite
def trials(draw, least=0):
    """A few, some of which failed; names differ."""
    figures = draw(st.lists(st.none() | FIGURES, min_size=least, max_size=8))
    stages = [draw(st.sampled_from(list(Stage))) for _ in figures]
    return [
        failed(f"t{i}") if index is None else Trial(f"t{i}", "XINT8", stage, measured=index)
        for i, (index, stage) in enumerate(zip(figures, stages, strict=True))
    ]


INFINITE = float("inf")
LIMITS = st.builds(
    Limits,
    size_bytes=st.sampled_from([INFINITE, 1.0, 10.0]),
    drop=st.sampled_from([INFINITE, 0.0, 1.0]),
    latency_ms=st.sampled_from([INFINITE, 1.0, 5.0]),
)
