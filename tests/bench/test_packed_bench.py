"""The table of packed files."""

from functools import partial

from bench.packed import HEADER, Figure, time_sessions
from bench.timing import Timing


def test_a_row_has_a_cell_for_every_heading():
    timing = Timing(0.1, 0.2, 5)
    times = dict.fromkeys(("float", "unpacked", "packed"), timing)
    figure = Figure(
        "net", "MXFP4E2M1", "portable", 102_000_000, 102_200_000, 13_800_000, 4.25, times, times, times, True
    )
    row = figure.row()
    assert len(row) == len(HEADER)
    assert row[3:7] == ["102.00", "102.20", "13.80", "4.25"]
    assert row[HEADER.index("packed / float")] == "1.00 x"
    assert row[-2:] == ["yes", "no"]


def test_sessions_are_made_in_turns():
    made: list[str] = []
    timings = time_sessions({name: partial(made.append, name) for name in "ab"}, 2)
    assert made == ["a", "b", "a", "b"]
    assert timings["a"].turns == 2
