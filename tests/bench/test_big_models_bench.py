"""The network for large models is what was asked for, and a row of the table holds its figures."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from bench.big_models import HEADER, Figure, Run, measure
from bench.big_network import build_network

from bench import big_network


def test_a_network_has_its_size_and_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(big_network, "CHANNELS", 16)
    monkeypatch.setattr(big_network, "WIDTH", 64)
    path, data = build_network(tmp_path / "net.onnx", 200_000)
    assert 200_000 <= data.stat().st_size < 500_000
    model = onnx.load(path, load_external_data=False)
    onnx.checker.check_model(str(path))
    assert {"Conv", "Gemm", "MatMul"} <= {node.op_type for node in model.graph.node}
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {"x": np.ones((1, 16, 4, 4), np.float32)})
    assert np.isfinite(result).all()
    assert result.any()


def test_a_row_is_of_the_best_runs() -> None:
    runs = [Run(6.0, 9.0, 7.0, 300.0, 3001.0), Run(8.0, 8.0, 9.0, 250.0, 3001.0)]
    figure = Figure("MXINT8", 3000.0, runs, [Run(2.0, 4.0, 2.0, 3.0, 3000.0)])
    cells = dict(zip(HEADER, figure.cells(), strict=True))
    assert (cells["peak MB"], cells["of the model"]) == ("250", "0.08 x")
    assert (cells["s"], cells["of a copy"], cells["of a copy on disk"]) == ("6.0", "3.0 x", "2.0 x")
    assert len(Figure("A8W8", 1.0, error="it broke").cells()) == len(HEADER)


@pytest.mark.skipif(sys.platform == "win32", reason="os.wait4")
def test_a_program_is_measured_with_its_files(tmp_path: Path) -> None:
    program = f"x = b'x' * 80_000_000; open({str(tmp_path / 'out')!r}, 'wb').write(x[:1_000_000]); print(0.001)"
    run = measure([sys.executable, "-c", program], tmp_path)
    assert run.file_mb == 1.0
    assert run.peak_mb > 80
    assert run.seconds == 0.001 <= run.seconds_on_disk
    assert run.process_seconds > run.seconds
    with pytest.raises(ChildProcessError, match="ValueError: no"):
        measure([sys.executable, "-c", "raise ValueError('no')"], tmp_path)
