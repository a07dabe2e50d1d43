"""The runtime uses weights where they lie in the user's file, and gets a copy where it cannot."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx_models import Net, random_feed, run_model

from quark.onnx import large_tensors, session
from quark.onnx.graph import set_constant
from quark.onnx.load import load
from quark.onnx.session import open_session


def network() -> onnx.ModelProto:
    net = Net()
    x = net.input("x", (2, 64))
    x = net.node("Gemm", x, net.weight(64, 40), net.weight(40), name="first")
    return net.model(net.node("MatMul", x, net.weight(40, 30), name="second"))


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of models whose weights were copied to a file; every model counts as large."""
    found: list[str] = []
    original = session._create_from_file

    def noting(model, options, providers, name):
        found.append(name)
        return original(model, options, providers, name)

    monkeypatch.setattr(session, "_create_from_file", noting)
    monkeypatch.setattr(session, "_FILE_FROM_BYTES", 1000)
    monkeypatch.setattr(large_tensors, "LARGE_MODEL_BYTES", 0)
    return found


@pytest.fixture(params=["net.data", "below/net.data"])
def model_path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "model" / "net.onnx"
    (path.parent / "below").mkdir(parents=True)
    onnx.save(network(), path, save_as_external_data=True, location=request.param, size_threshold=0)
    return path


def check(model: ir.Model) -> None:
    feed = random_feed(network())
    (expected,) = run_model(network(), feed).values()
    np.testing.assert_allclose(open_session(model, has_library=False).run(None, feed)[0], expected, rtol=1e-5)


def test_weights_of_a_file_are_not_copied(model_path, copies):
    check(load(model_path).model)
    assert not copies


def test_nor_are_they_with_more_outputs(model_path, copies):
    model = load(model_path).model
    more = open_session(model, extra_outputs=["first_out"], has_library=False)
    assert len(more.run(None, random_feed(network()))) == 2
    assert not copies


def test_many_weights_of_a_file_are_not_arranged_in_memory(model_path, copies, monkeypatch):
    def is_unpacked(model: ir.Model) -> bool:
        options = open_session(model, has_library=False).get_session_options()
        try:
            return bool(options.get_session_config_entry("session.disable_prepacking") == "1")
        except RuntimeError:  # older versions of ONNX Runtime raise where there is no such entry
            return False

    model = load(model_path).model
    assert not is_unpacked(model)
    monkeypatch.setattr(session, "_UNPACKED_FROM_BYTES", 4 * 64 * 40)
    check(model)
    assert is_unpacked(model)
    assert not copies


def test_a_weight_that_was_changed_is_copied_with_the_others(model_path, copies, monkeypatch):
    model = load(model_path).model
    gemm = next(node for node in model.graph if node.op_type == "Gemm")
    array = gemm.inputs[1].const_value.numpy()
    set_constant(model, gemm, 1, array.copy())
    monkeypatch.setattr(session, "_FILE_FROM_BYTES", array.nbytes - 1)
    check(model)
    assert copies
    copies.clear()
    monkeypatch.setattr(session, "_FILE_FROM_BYTES", array.nbytes + 1000)  # so little of it goes with the message
    check(model)
    assert not copies


def test_a_runtime_that_does_not_know_the_folder_gets_a_copy(model_path, copies, monkeypatch):
    monkeypatch.setattr(session, "_FOLDER_OF_WEIGHTS", "session.not_known_to_anybody")
    check(load(model_path).model)
    assert copies


def test_weights_at_odd_places_are_copied(tmp_path, copies):
    for filler in range(4):
        model = network()
        model.doc_string = "x" * filler
        onnx.save(model, tmp_path / "net.onnx")
        check(load(tmp_path / "net.onnx").model)
    assert copies


def test_in_memory_there_is_nothing_to_use_in_place(copies):
    check(load(network()).model)
    assert copies
