"""The table of packed files."""

from functools import partial

from bench.layered_network import Shape, build
from bench.packed import HEADER, Figure, session_megabytes, time_sessions
from bench.timing import Timing


def test_a_row_has_a_cell_for_every_heading():
    timing = Timing(0.1, 0.2, 5)
    times = dict.fromkeys(("float", "unpacked", "packed"), timing)
    megabytes = {"float": 250.0, "packed": 300.0}
    sizes = (102_000_000, 102_200_000, 13_800_000, 4.25)
    figure = Figure("net", "MXFP4E2M1", "portable", *sizes, times, times, times, megabytes, True)
    row = figure.row()
    assert len(row) == len(HEADER)
    assert row[3:7] == ["102.00", "102.20", "13.80", "4.25"]
    assert row[HEADER.index("packed / float")] == "1.00 x"
    assert row[HEADER.index("session MB: float") :][:4] == ["250", "", "300", "1.20 x"]
    assert row[-2:] == ["yes", "no"]


def test_sessions_are_made_in_turns():
    made: list[str] = []
    timings = time_sessions({name: partial(made.append, name) for name in "ab"}, 2)
    assert made == ["a", "b", "a", "b"]
    assert timings["a"].turns == 2


def test_the_memory_of_a_session_grows_with_its_weights(tmp_path):
    shapes = {"small": 8, "large": 128}
    paths = {name: build(tmp_path / f"{name}.onnx", Shape(20, width, 8)) for name, width in shapes.items()}
    assert session_megabytes(paths["small"]) < 10
    assert 10 < session_megabytes(paths["large"]) < 60  # 11 MB of weights
