"""Ranges of a small network's tensors against what ONNX Runtime and numpy give for the same data."""

from __future__ import annotations

import gc
import json
import logging
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from quark.errors import InvalidValueError, ModelError
from quark.formats import get_format, min_mse_position
from quark.onnx.calibrate import CalibrationOptions, FloatRunner, Wanted, calibrate, calibrate_candidates
from quark.onnx.calibrate.passes import Cutter, Turns, TurnsBroken
from quark.onnx.calibrate.runner import Tensor
from quark.onnx.data import Samples, input_infos, open_samples
from quark.ranges import Entropy, MinMax, MinMSE, Percentile, PowerOfTwoMinMSE, RangeMethod, TensorRange, range_of

INT8: Any = get_format("int8")
TENSORS = ("x", "conv", "relu", "y")


def network(batch: Any = "N", op: str = "Relu") -> onnx.ModelProto:
    generator = np.random.default_rng(0)
    weights = numpy_helper.from_array(generator.standard_normal((4, 3, 3, 3)).astype(np.float32), "w")
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["conv"], "conv_node", pads=[1, 1, 1, 1]),
        helper.make_node(op, ["conv"], ["relu"], "relu_node"),
        helper.make_node("GlobalAveragePool", ["relu"], ["y"], "pool_node"),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 3, 6, 6])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [batch, 4, 1, 1])
    graph = helper.make_graph(nodes, "network", [x], [y], [weights])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def images(count: int, seed: int = 1) -> Any:
    generator = np.random.default_rng(seed)
    return (generator.standard_normal((count, 3, 6, 6)) * generator.uniform(0.1, 5, (count, 1, 1, 1))).astype(
        np.float32
    )


def open_all(data: Any, model: ir.Model) -> Samples:
    """Nothing held out: the number asked for, and one to spare."""
    rows = list(data)
    return open_samples([*rows, rows[-1]], input_infos(model), count=sum(map(len, rows)))


def run(
    method: RangeMethod, data: Any, proto: onnx.ModelProto | None = None, options: CalibrationOptions | None = None
) -> dict[str, TensorRange]:
    model = ir.from_proto(proto or network())
    wanted = {name: Wanted(method, INT8, True) for name in TENSORS}
    with FloatRunner(model, wanted) as runner:
        return calibrate(runner, wanted, open_all(data, model), options)


def tensors_of(x: Any) -> dict[str, Any]:
    """By a session of our own with every tensor as an output."""
    model = network()
    for name in ("conv", "relu"):
        model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found = session.run(["conv", "relu", "y"], {"x": x})
    return {"x": x, **dict(zip(("conv", "relu", "y"), found, strict=True))}


METHODS = (MinMax(), Percentile(99.0), Entropy(), MinMSE(), PowerOfTwoMinMSE())


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_ranges_are_those_of_all_data_at_once(method: RangeMethod) -> None:
    x = images(11)
    found = run(method, [row[None] for row in x])
    assert list(found) == list(TENSORS)
    for name, tensor in tensors_of(x).items():
        expected = range_of(tensor, method, INT8, True)
        assert found[name].position == expected.position
        assert (found[name].lowest, found[name].highest) == pytest.approx(
            (expected.lowest, expected.highest), rel=1e-3, abs=1e-6
        )
        if isinstance(method, PowerOfTwoMinMSE):
            assert found[name].position == min_mse_position(tensor)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_batches_and_order_do_not_matter(method: RangeMethod) -> None:
    x = images(12)
    single = run(method, [row[None] for row in x])
    in_batches = run(method, [x[:5], x[5:]])
    turned = run(method, [row[None] for row in x[::-1]])
    tight = run(method, [x], options=CalibrationOptions(memory_limit_bytes=1))
    again = run(method, [row[None] for row in x])
    assert again == single
    assert turned == single
    assert tight == single
    for name in TENSORS:  # the runtime itself computes other last bits for other batch sizes
        a, b = in_batches[name], single[name]
        assert a.position == b.position
        assert (a.lowest, a.highest) == pytest.approx((b.lowest, b.highest), rel=1e-3, abs=1e-6)


def test_a_moving_average_sees_the_samples_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quark.ranges.method.LEAST_AVERAGED_SIZE", 1)
    x = images(9)
    found = run(MinMax(0.3), [row[None] for row in x])
    low = high = 0.0
    for n, row in enumerate(x, start=1):
        c = max(0.3, 1 / n)
        low, high = (1 - c) * low + c * float(row.min()), (1 - c) * high + c * float(row.max())
    assert (found["x"].lowest, found["x"].highest) == pytest.approx((low, high), rel=1e-6)


def test_a_model_of_a_fixed_batch_gets_batch_after_batch() -> None:
    x = images(6)
    found = run(MinMax(), [x], network(batch=2))
    assert (found["x"].lowest, found["x"].highest) == (x.min(), x.max())
    assert found["relu"].highest == pytest.approx(tensors_of(x)["relu"].max(), rel=1e-5)


def test_ranges_can_be_made_even() -> None:
    found = run(MinMax(), [images(4)], options=CalibrationOptions(has_symmetric_ranges=True))
    assert all(each.lowest == -each.highest for each in found.values())


def test_the_runner_gives_the_models_own_outputs() -> None:
    x = images(2)
    with FloatRunner(ir.from_proto(network()), ["conv", "relu"]) as runner:
        outputs = runner.outputs({"x": x})
    assert list(outputs) == ["y"]
    np.testing.assert_allclose(outputs["y"], tensors_of(x)["y"], rtol=1e-5)
    with pytest.raises(InvalidValueError, match="closed"):
        runner.outputs({"x": x})


@pytest.mark.parametrize("stays_open", [True, False])
def test_a_runner_that_rested_runs_the_model_as_it_was(stays_open: bool) -> None:
    model, x = ir.from_proto(network()), images(3)
    with FloatRunner(model, ["conv"], stays_open=stays_open) as runner:
        before = runner.outputs_of([{"x": each[None]} for each in x])
        opened = weakref.ref(runner._session)
        weight = model.graph.initializers["w"]
        assert weight.const_value is not None
        weight.const_value = ir.Tensor(2 * weight.const_value.numpy(), name="w")
        runner.rest()
        gc.collect()
        assert (opened() is not None) == stays_open
        after = runner.outputs_of([{"x": each[None]} for each in x])
    for first, second in zip(before, after, strict=True):
        np.testing.assert_array_equal(first["y"], second["y"])


def test_nonfinite_activations_are_named_with_tensor_and_sample() -> None:
    x = images(5)
    x[3] = 3e38  # finite, and its sums are not
    with pytest.raises(InvalidValueError, match=r"tensor 'conv' .* sample 3.*NaN or Inf"):
        run(MinMax(), [row[None] for row in x])


def test_what_the_graph_does_not_compute_is_refused() -> None:
    model = ir.from_proto(network())
    with pytest.raises(ModelError, match="nowhere"):
        FloatRunner(model, ["nowhere"])


def test_an_error_of_the_runtime_is_a_model_error() -> None:
    model = ir.from_proto(network())
    with FloatRunner(model) as runner, pytest.raises(ModelError, match="cannot run"):
        runner.outputs({"x": np.zeros((1, 9, 6, 6), np.float32)})


def test_nothing_wanted_is_nothing_run() -> None:
    model = ir.from_proto(network())
    with FloatRunner(model) as runner:
        assert calibrate(runner, {}, open_all(images(2)[:, None], model)) == {}


def test_progress_counts_samples_of_both_passes() -> None:
    from contextlib import contextmanager

    told: list[Any] = []

    @contextmanager
    def recording(total: int, description: str) -> Any:
        told.append((total, description))
        yield lambda: told.append(1)

    model = ir.from_proto(network())
    wanted = {"relu": Wanted(Percentile(), INT8, True)}
    with FloatRunner(model, wanted) as runner:
        calibrate(runner, wanted, open_all(images(3)[:, None], model), progress=recording)
    assert told == [(3, "calibrating"), 1, 1, 1, (3, "calibrating, second pass"), 1, 1, 1]


@pytest.mark.parametrize("known", [(), ("conv", "relu"), ("conv",)], ids=["none", "all", "some"])
def test_candidates_take_one_pass_if_all_extremes_are_known(known: tuple[str, ...]) -> None:
    from contextlib import contextmanager

    passes: list[str] = []

    @contextmanager
    def recording(total: int, description: str) -> Any:
        passes.append(description)
        yield lambda: None

    model, data = ir.from_proto(network()), images(5)[:, None]
    samples = open_all(data, model)
    wanted = {name: Wanted(MinMax(), INT8, True) for name in ("conv", "relu")}
    with FloatRunner(model, wanted) as runner:
        ranges = calibrate(runner, wanted, samples)
        observed = {name: ranges[name].observed for name in known}
        found = calibrate_candidates(runner, wanted, observed, samples, CalibrationOptions(), recording)
    assert len(passes) == (1 if len(known) == 2 else 2)
    for name, by_method in found.items():
        assert by_method["MinMax"] == ranges[name]
        for method in (Percentile(), MinMSE(), Entropy()):
            assert by_method[str(method)] == run(method, data)[name]


# ---- the cache ----
def test_the_cache_is_used_and_keyed_by_data_and_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import quark.onnx.calibrate as step

    runs: list[int] = []
    observe = step._observe

    def counted(*rest: Any) -> Any:
        runs.append(1)
        return observe(*rest)

    monkeypatch.setattr(step, "_observe", counted)
    options = CalibrationOptions(cache=tmp_path / "cache")
    data = [images(3)]
    first = run(PowerOfTwoMinMSE(), data, options=options)
    assert run(PowerOfTwoMinMSE(), data, options=options) == first
    assert len(runs) == 1
    run(MinMax(), data, options=options)
    run(PowerOfTwoMinMSE(), [images(3, seed=2)], options=options)
    run(PowerOfTwoMinMSE(), data, network(op="Sigmoid"), options=options)
    assert len(runs) == 4
    for file in (tmp_path / "cache").iterdir():
        assert json.loads(file.read_text())["ranges"]
        file.write_text("{ truncated")
    with caplog.at_level(logging.WARNING, "quark"):
        assert run(PowerOfTwoMinMSE(), data, options=options) == first
    assert "ignored" in caplog.text
    assert len(runs) == 5
    assert run(PowerOfTwoMinMSE(), data, options=options) == first
    assert len(runs) == 5


def test_a_cache_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, "quark"):
        found = run(MinMax(), [images(2)], options=CalibrationOptions(cache=tmp_path / "file"))
    assert found
    assert "not written" in caplog.text


# ---- its parts ----
def test_pieces_follow_the_memory_once_it_is_known() -> None:
    cutter = Cutter({"x": ("N", 2)}, limit_bytes=100)
    x = np.arange(20).reshape(10, 2)
    pieces = cutter.cut({"x": x})
    sizes = [len(next(pieces)["x"])]
    cutter.row_bytes = 25
    sizes += [len(piece["x"]) for piece in pieces]
    assert sizes == [1, 4, 4, 1]
    assert len(list(Cutter({"x": ("N", 2), "s": ()}, 1).cut({"x": x, "s": np.array(1)}))) == 1
    assert [len(feeds["x"]) for feeds in Cutter({"x": ("T", 2)}, 1, has_batch_first=False).cut({"x": x})] == [10]
    with pytest.raises(InvalidValueError, match="different numbers"):
        list(Cutter({"x": (2, 2), "z": (5, 2)}, 1).cut({"x": x, "z": x}))


def test_turns_are_in_order_and_end_when_one_gives_up() -> None:
    from concurrent.futures import ThreadPoolExecutor

    turns, order = Turns(), []

    def work(number: int) -> None:
        with turns.take(number):
            order.append(number)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, [2, 0, 3, 1]))
    assert order == [0, 1, 2, 3]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(work, 9)
        turns.give_up()
        assert isinstance(waiting.exception(), TurnsBroken)


def test_an_array_keeps_the_memory_of_its_value() -> None:
    class Value:
        """A runtime's value that can be watched."""

        def __init__(self) -> None:
            self._value = onnxruntime.OrtValue.ortvalue_from_numpy(np.arange(5, dtype=np.float32))

        def __getattr__(self, name: str) -> object:
            return getattr(self._value, name)

    value = Value()
    watch = weakref.ref(value)
    part = Tensor(value).array[1:]
    del value
    gc.collect()
    assert watch() is not None
    assert part.tolist() == [1.0, 2.0, 3.0, 4.0]
    del part
    gc.collect()
    assert watch() is None
