"""The table of real networks, with a judge script and two tiny networks of the test's own."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import bench.networks
import numpy as np
import onnx
import pytest
from bench.child import OURS, run_script
from bench.macs import Macs, count_macs
from bench.networks import (
    CONVOLUTIONAL,
    PEER_CONFIGURATIONS,
    TRANSFORMER,
    Configuration,
    Figure,
    configurations,
    has_protection,
    kind_of,
    main,
    table,
)
from bench.peers import static_settings
from bench.record import Record
from bench.samples import SampleFolder
from bench.side_by_side import FLOAT
from bench.timing import Timing
from onnx import TensorProto, helper, numpy_helper

# `pair` has two inputs, one of them of free width, and reports an error rate; a file called crash ends its process
JUDGE = """
import os
import numpy as np
import onnxruntime
from sibling import WIDTHS

class Network:
    def __init__(self, zoo):
        self.model = f"{zoo}/{self.name}.onnx"

    def feed(self, number):
        random = np.random.default_rng(number)
        width = WIDTHS[number % len(WIDTHS)]
        return {"x": random.normal(size=(1, 3, 8, width)).astype(np.float32), "gain": np.full((1, 1), 1.5, np.float32)}

    def calibration(self):
        return [self.feed(number) for number in range(10)]

    def outputs(self, path, library=None):
        options = onnxruntime.SessionOptions()
        if library is not None:
            options.register_custom_ops_library(str(library))
        session = onnxruntime.InferenceSession(str(path), options)
        return [session.run(None, self.feed(number))[0] for number in range(20, 24)]

    def evaluate(self, path, library=None):
        if os.path.basename(path) == "crash.onnx":
            os._exit(3)
        pairs = zip(self.outputs(self.model), self.outputs(path, library))
        error = max(float(np.abs(a - b).max() / np.abs(a).max()) for a, b in pairs)
        return {"error_percent": round(100 * error, 2), "float_error_percent": 0.0}

class Pair(Network):
    name = "pair"

class Absent(Network):
    name = "absent"

NETWORKS = {"pair": Pair, "absent": Absent}
"""


@pytest.fixture
def zoo(tmp_path: Path) -> Path:
    folder = tmp_path / "zoo"
    folder.mkdir()
    random = np.random.default_rng(0)
    weight = random.normal(size=(4, 3, 3, 3)).astype(np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "w"], ["c"], name="conv", pads=[1, 1, 1, 1]),
            helper.make_node("Relu", ["c"], ["r"], name="relu"),
            helper.make_node("GlobalAveragePool", ["r"], ["p"], name="pool"),
            helper.make_node("Flatten", ["p"], ["f"], name="flatten"),
            helper.make_node("Mul", ["f", "gain"], ["y"], name="scale"),
        ],
        "pair",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 8, "width"]),
            helper.make_tensor_value_info("gain", TensorProto.FLOAT, [1, 1]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4])],
        [numpy_helper.from_array(weight, "w")],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), folder / "pair.onnx"
    )
    (tmp_path / "judge.py").write_text(JUDGE)
    (tmp_path / "sibling.py").write_text("WIDTHS = (8, 12, 10)\n")
    return folder


@pytest.fixture
def run(zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Record]:
    """Run the bench on these networks and return its record."""

    def run_main(*given: str) -> Record:
        places = ["--zoo", str(zoo), "--judge", str(tmp_path / "judge.py"), "--output", str(tmp_path / "out")]
        monkeypatch.setattr(sys, "argv", ["networks", *places, "--turns", "1", "--calib-samples", "4", *given])
        main()
        (path,) = (tmp_path / "out").glob("*.json")
        return Record.read(path)

    return run_main


@pytest.mark.slow
def test_ours_beside_float_and_nothing_twice(
    run: Callable[..., Record], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--presets", "A8W8", "MXINT8", "--no-unprotected", "--peers", "none", "--resume")
    record = run(*given)
    assert [row[:3] for row in record.rows] == [
        ["pair", "float", ""],
        ["pair", "ours", "A8W8"],
        ["pair", "ours", "MXINT8"],
    ]
    figures = {figure["configuration"]: Figure.from_json(figure) for figure in record.figures}
    assert figures[""].measures["error_percent"] == 0
    assert 0 < figures["A8W8"].measures["error_percent"] < 20
    assert (figures["A8W8"].eight_bit_percent, figures["MXINT8"].eight_bit_percent) == (100, 0)
    assert figures["A8W8"].verdict in ("ok", "degraded", "collapsed")
    assert set(figures["A8W8"].latencies) == {FLOAT, "file"}
    assert figures["A8W8"].samples == 4
    assert not record.blanks
    assert "--zoo PATH --judge PATH" in record.command
    assert str(tmp_path) not in record.path.read_text()
    capsys.readouterr()
    again = run(*given)
    assert "0 rows to measure" in capsys.readouterr().err
    assert (again.rows, again.figures) == (record.rows, record.figures)
    with pytest.raises(SystemExit, match="--resume.*'turns': 1.*'turns': 2"):
        run(*given, "--turns", "2")


@pytest.mark.slow
def test_peers_are_blank_where_they_fail_and_their_files_are_kept(
    run: Callable[..., Record], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    static = static_settings("QUInt8", "QInt8", "MinMax")
    monkeypatch.setattr(
        bench.networks,
        "PEER_CONFIGURATIONS",
        (
            Configuration("onnxruntime", "products only", settings=static | {"op_types": ["Conv"]}),
            Configuration("onnxruntime", "broken", settings=static | {"weight": "NoSuchType"}),
        ),
    )
    # the environment of this test has the package that the peer is
    given = ("--presets", "none", "--peers", f"onnxruntime={sys.executable}", "--keep", str(tmp_path / "keep"))
    record = run(*given)
    figures = {figure["configuration"]: Figure.from_json(figure) for figure in record.figures}
    assert figures["products only"].measures["error_percent"] > 0
    assert figures["products only"].eight_bit_percent == 100
    assert figures["broken"].measures == {}
    assert [(blank.what, "NoSuchType" in blank.reason) for blank in record.blanks] == [("pair broken", True)]
    assert any(row[3].startswith("**error_percent ") for row in record.rows)
    (kept,) = (tmp_path / "keep").rglob("*.onnx")
    made_at = kept.stat().st_mtime_ns
    again = run(*given)
    assert kept.stat().st_mtime_ns == made_at
    seconds = {figure["configuration"]: figure["seconds"] for figure in again.figures}
    assert seconds["products only"] == figures["products only"].seconds


def test_samples_are_evenly_spaced_and_some_are_left_to_hold_out(zoo: Path, tmp_path: Path) -> None:
    folder = tmp_path / "samples"
    folder.mkdir()
    job = {"task": "calibration", "judge": str(tmp_path / "judge.py"), "zoo": str(zoo), "name": "pair"}
    found = run_script(sys.executable, "judge.py", job | {"folder": str(folder), "count": 4, "spare": 2})
    assert found == {"count": 4, "spare": 2, "available": 10}
    widths = []
    for path in sorted(folder.iterdir()):
        with np.load(path) as arrays:
            widths.append(arrays["x"].shape[3])
    # samples 0, 2, 5, 7 and then 1, 6; the widths repeat 8, 12, 10
    assert widths == [8, 10, 10, 12, 12, 8]
    samples = SampleFolder(folder, 4)
    assert samples.first()["gain"].tolist() == [[1.5]]
    assert samples.digest() != SampleFolder(folder, 3).digest()


def test_a_file_that_crashes_the_judge_leaves_the_others(zoo: Path, tmp_path: Path) -> None:
    crash = tmp_path / "crash.onnx"
    broken = tmp_path / "broken.onnx"
    for path in (crash, broken):
        path.write_bytes(b"no model")
    judge = bench.networks.Judge(sys.executable, zoo, {"pair": tmp_path / "judge.py"}, 60)
    files = {("pair", "x", str(i)): (path, False) for i, path in enumerate((crash, zoo / "pair.onnx", broken))}
    results = list(judge.evaluate("pair", files).values())
    assert "status 3" in results[0]["error"]
    assert results[1]["measures"] == {"error_percent": 0.0, "float_error_percent": 0.0}
    assert "broken.onnx" in results[2]["error"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--only", "nothing"), "--only nothing.*pair, absent"),
        (("--only", "absent"), r"absent.*\.onnx.*build it first"),
        (("--judge", "none.py"), "--judge none.py: no such file"),
        (("--judge-python", "no-python"), "--judge-python no-python: no such program"),
        (("--zoo", "nowhere"), "--zoo nowhere: no such folder"),
        (("--presets", "A8W9"), "A8W9.*A8W8"),
    ],
)
def test_bad_arguments_end_before_the_work(run: Callable[..., Record], given: tuple[str, ...], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        run("--peers", "none", *given)


@pytest.mark.parametrize(
    ("text", "message"), [("NETWORKS = 3", "no NETWORKS"), ("import no_such_module", "no_such_module.*--judge-python")]
)
def test_a_script_that_is_no_judge_is_named(
    run: Callable[..., Record], tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "other.py").write_text(text)
    with pytest.raises(SystemExit, match=f"other.py.*{message}"):
        run("--peers", "none", "--judge", str(tmp_path / "other.py"))


def figure(quantizer: str, configuration: str, measures: dict[str, float], *, is_static: bool = True) -> Figure:
    return Figure("net", CONVOLUTIONAL, quantizer, configuration, is_static, 8, measures)


@pytest.mark.parametrize(("measure", "best"), [("box_f1", "high"), ("cer_percent", "low")])
def test_the_best_static_peer_is_bold_by_the_first_measure(measure: str, best: str) -> None:
    figures = [
        figure("nncf", "high", {measure: 0.9, "boxes": 1}),
        figure("onnxruntime", "low", {measure: 0.5, "boxes": 2}),
        figure("onnxruntime", "nan", {measure: float("nan")}),
        figure("onnxruntime", "failed", {}),
        figure("onnxruntime", "dynamic", {measure: 1.0 if best == "high" else 0.0}, is_static=False),
        figure(OURS, "A8W8", {measure: 1.0 if best == "high" else 0.0}),
    ]
    rows = table(figures)
    assert rows[0][1] == OURS
    assert [row[2] for row in rows if row[3].startswith("**")] == [best]


def test_cells_have_ratios_and_the_value_of_float() -> None:
    made = figure(OURS, "A8W8", {"cer_percent": 1.25, "lines": 120, "float_cer_percent": 0.73})
    made.latencies = {
        FLOAT: Timing(0.02, 0.02, 1),
        "file": Timing(0.012, 0.013, 1),
        "unprotected": Timing(0.01, 0.01, 1),
    }
    made.verdict, made.seconds, made.file_mb, made.eight_bit_percent = "ok", 3.21, 4.567, 92.44
    expected = ["ok", "3.2", "4.57", "12.00", "0.60 x", "1.20 x", "92.4"]
    assert made.cells(is_best=False)[3:] == ["cer_percent 1.25 (0.73), lines 120", *expected]


def test_presets_and_peers_go_by_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = Namespace(presets=None, no_unprotected=False)
    monkeypatch.setattr(bench.networks, "has_protection", lambda preset: preset == "XINT8")
    ours = [
        configuration
        for configuration in configurations(TRANSFORMER, arguments, ["nncf"])
        if configuration.quantizer == OURS
    ]
    labels = [each.label for each in ours]
    assert labels[0] == "INT8_TRANSFORMER_DEFAULT"
    assert labels[labels.index("XINT8") + 1] == "XINT8, Protect: none"
    assert sum("Protect" in label for label in labels) == 1
    for kind in (CONVOLUTIONAL, TRANSFORMER):
        peers = [
            configuration
            for configuration in configurations(kind, arguments, ["nncf", "onnxruntime"])
            if configuration.quantizer != OURS
        ]
        assert {"nncf", "onnxruntime"} == {peer.quantizer for peer in peers}
        assert all(
            ("model_type" in peer.settings) == (kind == TRANSFORMER) for peer in peers if peer.quantizer == "nncf"
        )
        assert any(not peer.is_static for peer in peers) == (kind == TRANSFORMER)
    assert len({(configuration.quantizer, configuration.label) for configuration in PEER_CONFIGURATIONS}) == len(
        PEER_CONFIGURATIONS
    )


def test_protection_is_only_turned_off_where_the_option_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not has_protection("mine.yaml")
    monkeypatch.setattr(bench.networks, "UNPROTECTED", {"NoSuchOption": "none"})
    assert not has_protection("A8W8")
    monkeypatch.setattr(bench.networks, "UNPROTECTED", {"ActivationSymmetric": True})
    assert has_protection("A8W8")


def test_a_transformer_has_a_softmax_and_mostly_matrix_products(zoo: Path, tmp_path: Path) -> None:
    feeds = {"x": np.ones((1, 3, 8, 8), np.float32), "gain": np.ones((1, 1), np.float32)}
    macs = count_macs(zoo / "pair.onnx", feeds)
    assert macs.total == 4 * 64 * 27
    assert kind_of(zoo / "pair.onnx", macs) == CONVOLUTIONAL
    graph = helper.make_graph([helper.make_node("Softmax", ["x"], ["y"])], "net", [], [])
    onnx.save(helper.make_model(graph), tmp_path / "softmax.onnx")
    assert kind_of(tmp_path / "softmax.onnx", Macs(10, 0, {"MatMul": 6, "Conv": 4})) == TRANSFORMER
    assert kind_of(tmp_path / "softmax.onnx", Macs(10, 0, {"MatMul": 4, "Conv": 6})) == CONVOLUTIONAL
    assert kind_of(zoo / "pair.onnx", Macs(10, 0, {"MatMul": 6, "Conv": 4})) == CONVOLUTIONAL
