"""An exported file computes what the frozen network does, for every kind of number and of layer."""

from __future__ import annotations

import copy
import functools
import json
import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from frozen_networks import example_of, float_network, frozen_network

from quark.errors import (
    InvalidValueError,
    MissingDependencyError,
    ModelError,
    UnsupportedOptionError,
    UnsupportedTypeError,
)
from quark.onnx.session import open_session
from quark.plan import Role
from quark.torch import ModelQuantizer
from quark.torch.capture import capture
from quark.torch.export import ExportError, ExportReport, ModelExporter, export_onnx, write_onnx
from quark.torch.export.config.config import ExporterConfig, JsonExporterConfig
from quark.torch.export.parity import outputs_of
from quark.torch.quantization.config.config import Config, QuantizationConfig, QuantizationSpec
from quark.torch.quantization.config.type import Dtype
from quark.torch.quantization.observer.observer import PerTensorMinMaxObserver
from quark.torch.train.networks import QuantizedNetwork

torch.set_num_threads(1)

# Every kind of number, each on a network that has layers for it.
CASES = [
    *(("plain", style) for style in ("int8_pof2", "mxfp4")),
    *(("residual", style) for style in ("int8", "dynamic")),
    *(("attention", style) for style in ("int4_groups", "weight_only")),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (("plain", "int16"), ("plain", "int4"), ("attention", "int8"))
        + (("plain", "bfloat16"), ("residual", "uint8"), ("residual", "mx6"))
        + (("attention", "bfp16"), ("attention", "dynamic"))
    ),
]
# Codes differ by one here and there where sums are in another order: one step of 8 bits in the largest value.
TOLERANCE = 1.0 / 127


def relative_error(actual: list[np.ndarray], expected: list[np.ndarray]) -> float:
    pairs = zip(actual, expected, strict=True)
    return max(float(np.abs(a - e).max() / np.abs(e).max()) for a, e in pairs)


def run(path: Path, x: torch.Tensor, **options: bool) -> list[np.ndarray]:
    session = open_session(path, threads=1, **options)
    return session.run(None, {session.get_inputs()[0].name: x.numpy()})


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], ExportReport]:
    """Each network once in each style, since exporting takes a second."""

    @functools.cache
    def export(name: str, style: str) -> ExportReport:
        folder = tmp_path_factory.mktemp(f"{name}_{style}")
        report = write_onnx(frozen_network(name, style), example_of(name), folder / "network.onnx")
        assert sorted(each.name for each in folder.iterdir()) == ["network.json", "network.onnx"]
        return report

    return export


@pytest.mark.parametrize(("name", "style"), CASES)
def test_a_file_gives_what_the_network_gives(name: str, style: str, exported) -> None:
    network, report = frozen_network(name, style), exported(name, style)
    assert report.parity is not None
    assert report.parity.sqnr_db > 40
    x = example_of(name, batch=3) * 0.9  # another batch, other numbers
    expected = outputs_of(network, (x,))
    assert relative_error(run(report.path, x), expected) < TOLERANCE
    assert relative_error(run(report.path, x, has_library=False), expected) < TOLERANCE
    assert relative_error(run(report.path, x, has_optimizations=False), expected) < TOLERANCE
    wanted = {(tensor.tensor, tensor.role) for tensor in network.plan}
    assert Counter(role for _, role in wanted) <= Counter(tensor.role for tensor in report.plan)


@pytest.mark.parametrize("style", ["int8", "bfp16"])
def test_weights_of_linear_layers_are_constants_of_the_product(style: str, exported) -> None:
    """No Transpose stands between a stored weight and its MatMul, and axes are those of the turned weight."""
    report = exported("attention", style)
    weights = {tensor.tensor: tensor for tensor in report.plan if tensor.role is Role.WEIGHT}
    assert set(weights) == {f"{value}.weight" for value in ("query", "key", "value", "out", "head")}
    assert weights["query.weight"].choice.axis == (0 if style == "bfp16" else 1)
    assert weights["head.weight"].choice.axis == (1 if style == "bfp16" else 0)  # Gemm turns by itself
    graph = onnx.load(report.path).graph
    transposed = {value for node in graph.node if node.op_type == "Transpose" for value in node.input}
    assert not [value for value in transposed if "weight" in value]


def test_names_are_those_of_the_model(exported) -> None:
    report = exported("residual", "int8")
    graph = onnx.load(report.path).graph
    assert [each.name for each in graph.input] == ["x"]
    assert [each.name for each in graph.output] == ["output", "output_1"]
    assert graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    names = {node.op_type: node.name for node in graph.node}
    assert (names["Gemm"], names["Concat"], names["Add"]) == ("fc", "cat", "add")
    assert {node.name for node in graph.node if node.op_type == "Conv"} == {"stem", "conv1", "conv2"}
    content = report.path.read_bytes()
    assert str(Path(__file__).parent).encode() not in content
    assert b"QuarkTap" not in content


def test_a_float_network_keeps_the_names_of_its_weights(tmp_path: Path) -> None:
    network = float_network("attention")
    report = write_onnx(network, example_of("attention"), tmp_path / "n.onnx")
    assert not report.plan.tensors
    assert report.parity is not None
    assert report.parity.sqnr_db > 100
    initializers = {each.name for each in onnx.load(report.path).graph.initializer}
    assert initializers >= set(network.state_dict())


@pytest.mark.parametrize(("name", "style", "count"), [("plain", "int8", 2), ("residual", "uint8", 3)])
def test_convolutions_become_integer_kernels(name: str, style: str, count: int, exported, tmp_path: Path) -> None:
    """Also where the runtime keeps the activation, since int8 codes reach below zero."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(exported(name, style).path, options, providers=["CPUExecutionProvider"])
    types = Counter(node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node)
    assert types["QLinearConv"] == count, types


@pytest.mark.parametrize(
    ("name", "style", "opset"), [("residual", "int8", 18), ("attention", "int4_groups", 21), ("plain", "mxfp4", 18)]
)
def test_the_opset_is_the_oldest_that_will_do(name: str, style: str, opset: int, exported) -> None:
    report = exported(name, style)
    imports = {opset.domain: opset.version for opset in onnx.load(report.path).opset_import}
    assert imports[""] == report.opset == opset


@pytest.mark.parametrize(("name", "opset"), [("plain", 14), ("residual", 14), ("attention", 17)])
def test_an_older_opset_is_converted(name: str, opset: int, tmp_path: Path) -> None:
    report = write_onnx(frozen_network(name, "int8"), example_of(name), tmp_path / "n.onnx", opset=opset)
    assert {opset.version for opset in onnx.load(report.path).opset_import if not opset.domain} == {opset}
    assert report.opset == opset
    assert report.parity is not None
    assert report.parity.sqnr_db > 60


def test_an_opset_that_the_converter_does_not_reach_names_those_that_work(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="opset 16: .*LayerNormalization.* Leave the opset out, or give 18 to 23"):
        write_onnx(frozen_network("attention", "int8"), example_of("attention"), tmp_path / "n.onnx", opset=16)
    assert not (tmp_path / "n.onnx").exists()


@pytest.mark.parametrize(
    ("opset", "message"), [(20, "groups need 21"), (13, "expected 14 to 23"), (99, "expected 14 to 23")]
)
def test_an_opset_that_cannot_be_is_refused(opset: int, message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match=message):
        write_onnx(frozen_network("plain", "int4_groups"), example_of("plain"), tmp_path / "n.onnx", opset=opset)


def test_a_batch_is_fixed_where_that_is_wanted(tmp_path: Path) -> None:
    x = example_of("plain", 2)
    report = write_onnx(frozen_network("plain", "int8"), {"image": x}, tmp_path / "n.onnx", dynamic_batch=False)
    assert onnx.load(report.path).graph.input[0].type.tensor_type.shape.dim[0].dim_value == 2
    assert report.parity is not None
    assert report.parity.samples == 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_networks_in_half_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    """float16 stays; bfloat16 is written as float32, which ONNX Runtime computes in."""
    network = copy.deepcopy(frozen_network("plain", "int8")).to(dtype)
    report = write_onnx(network, example_of("plain").to(dtype), tmp_path / "n.onnx")
    kind = onnx.load(report.path).graph.input[0].type.tensor_type.elem_type
    assert kind == (onnx.TensorProto.FLOAT16 if dtype is torch.float16 else onnx.TensorProto.FLOAT)
    assert report.parity is not None
    assert report.parity.sqnr_db > 30


def trained() -> QuantizedNetwork:
    """A network with a batch norm that is not folded yet, as it comes from quantize_model."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(torch.nn.Conv2d(3, 8, 3, padding=1, bias=False), torch.nn.BatchNorm2d(8), torch.nn.ReLU()),
        *(torch.nn.Dropout(0.1), torch.nn.Flatten(), torch.nn.Linear(128, 5)),
    )
    int8 = QuantizationSpec(dtype=Dtype.int8, observer_cls=PerTensorMinMaxObserver, symmetric=True)
    layers = QuantizationConfig(input_tensors=int8, output_tensors=int8, weight=int8)
    return ModelQuantizer(Config(layers)).quantize_model(model, [torch.randn(4, 3, 4, 4)])


def test_a_network_that_still_trains_is_frozen_in_a_copy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    network = trained()
    before = {key: value.clone() for key, value in network.state_dict().items()}
    network.train()
    with caplog.at_level(logging.INFO, "quark.torch.export"):
        report = write_onnx(network, torch.randn(1, 3, 4, 4), tmp_path / "n.onnx")
    assert [message for message in caplog.messages if "frozen copy" in message]
    assert network.training
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())
    x = torch.randn(3, 3, 4, 4)
    assert relative_error(run(report.path, x), outputs_of(ModelQuantizer.freeze(network), (x,))) < TOLERANCE
    graph = onnx.load(report.path).graph
    assert {node.name for node in graph.node if node.op_type in ("Conv", "Gemm")} == {"0", "5"}
    assert {tensor.tensor for tensor in report.plan if tensor.role is Role.WEIGHT} == {"0.weight", "5.weight"}


class TwoInputs(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(10, 4)
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": self.linear(x) + self.embedding(ids), "x": 2 * x}


def test_inputs_by_name_or_in_order_and_errors_that_name_them(tmp_path: Path) -> None:
    example = {"ids": torch.tensor([1, 2]), "x": torch.rand(2, 4)}
    network = capture(TwoInputs(), lambda: tuple(example.values()))
    report = write_onnx(network, {"x": example["x"], "ids": example["ids"]}, tmp_path / "n.onnx")
    assert [each.name for each in onnx.load(report.path).graph.input] == ["ids", "x"]
    assert len(onnx.load(report.path).graph.output) == 2
    with pytest.raises(InvalidValueError, match="takes 2: ids, x"):
        write_onnx(network, example["x"], tmp_path / "n.onnx")
    with pytest.raises(InvalidValueError, match="network takes ids, x"):
        write_onnx(network, {"ids": example["ids"]}, tmp_path / "n.onnx")


class Bessel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = torch.nn.Sequential(BesselLayer())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x)


class BesselLayer(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.special.bessel_j0(x) + 1


def test_an_operator_without_a_form_in_onnx_is_named_with_its_line(tmp_path: Path) -> None:
    network = capture(Bessel(), lambda: (torch.rand(2, 3),))
    with pytest.raises(ExportError, match=r"bessel_j0.* of 'block.0', .*test_export_onnx.py:\d+, cannot be written"):
        write_onnx(network, torch.rand(2, 3), tmp_path / "n.onnx")
    assert not list(tmp_path.iterdir())


def test_without_onnxscript_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="onnxscript"):
        write_onnx(float_network("plain"), example_of("plain"), tmp_path / "n.onnx")


def test_the_exporter_is_silent(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    network = frozen_network("plain", "int8")
    recwarn.clear()
    capfd.readouterr()
    write_onnx(network, example_of("plain", 1), tmp_path / "n.onnx", check=False)
    printed = capfd.readouterr()
    assert not printed.out
    assert not printed.err
    assert not recwarn.list


def test_the_model_exporter_makes_its_folder_and_writes_json_beside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "a" / "b"
    exporter = ModelExporter(ExporterConfig(json_export_config=JsonExporterConfig()), folder)
    network = frozen_network("plain", "int8")
    with caplog.at_level(logging.INFO, "quark.torch.export"):
        path = exporter.export_onnx_model(network, example_of("plain", 1))
    assert path == folder / "quark_model.onnx"
    assert path.is_file()
    assert [message for message in caplog.messages if "agree" in message]
    content = json.loads((folder / "quark_model.json").read_text())
    assert content["parity"]["agreement"] == 1.0
    assert len(content["plan"]["tensors"]) >= len(network.plan.tensors)
    with pytest.raises(InvalidValueError, match="without folders"):
        exporter.export_onnx_model(network, example_of("plain"), "../other.onnx")
    weights, config = exporter.export_safetensors_model(network)
    assert weights.is_file()
    assert config.is_file()


def test_export_onnx_takes_the_folder_and_the_inputs_as_amd_quark_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    network, x = frozen_network("plain", "int8"), example_of("plain", 1)
    names = (["image"], ["scores"])
    report = export_onnx(network, tmp_path / "a" / "b", (x,), 18, *names, True, False, None, True, True)
    assert report.path == tmp_path / "a" / "b" / "quark_model.onnx"
    session = open_session(report.path, threads=1)
    assert [input_.name for input_ in session.get_inputs()] == names[0]
    assert [output.name for output in session.get_outputs()] == names[1]
    assert report.opset == 18
    assert relative_error(session.run(None, {"image": x.numpy()}), outputs_of(network, (x,))) < TOLERANCE
    assert "image" in {tensor.tensor for tensor in report.plan}
    assert "QuantizeLinear(image" in capsys.readouterr().out
    with pytest.raises(InvalidValueError, match=r"input_names \['a', 'b'\]: expected at most 1"):
        export_onnx(network, tmp_path, x, input_names=["a", "b"])
    with pytest.raises(UnsupportedOptionError, match="operator_export_type ONNX_ATEN"):
        export_onnx(network, tmp_path, x, operator_export_type="ONNX_ATEN")


def test_the_former_arguments_of_export_onnx_work_by_name(tmp_path: Path) -> None:
    network, x = frozen_network("plain", "int8"), example_of("plain", 1)
    with pytest.warns(DeprecationWarning, match=r"export_onnx\(model, output_dir, input_args"):
        report = export_onnx(network, example_input=x, path=tmp_path / "former.onnx", opset=19, check=False)
    assert report.path == tmp_path / "former.onnx"
    assert report.opset == 19
    with (
        pytest.warns(DeprecationWarning, match="path=..."),
        pytest.raises(InvalidValueError, match="output_dir and path"),
    ):
        export_onnx(network, tmp_path, x, path=tmp_path / "former.onnx")
    with (
        pytest.warns(DeprecationWarning, match="opset=..."),
        pytest.raises(InvalidValueError, match="opset_version and opset"),
    ):
        export_onnx(network, tmp_path, x, 19, opset=20)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_args": None}, "input_args: expected an example"),
        ({"opset_version": "17"}, "opset '17': expected 14 to 23"),
        ({"input_names": "x"}, "input_names 'x': expected a list"),
    ],
)
def test_wrong_arguments_of_export_onnx(tmp_path: Path, arguments: dict[str, object], message: str) -> None:
    network, x = frozen_network("plain", "int8"), example_of("plain", 1)
    with pytest.raises((InvalidValueError, UnsupportedTypeError), match=message):
        export_onnx(network, tmp_path, **{"input_args": x, **arguments})
    assert not list(tmp_path.iterdir())
