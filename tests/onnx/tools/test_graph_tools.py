"""Tools on shapes, layout, opset, initializers, text and folders of results: what they change and what they keep."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from quark.errors import InvalidValueError, ModelError
from quark.onnx.session import open_session
from quark.onnx.tools import (
    convert_dynamic_to_fixed,
    convert_nchw_to_nhwc,
    convert_onnx_to_onnxtxt,
    convert_onnxtxt_to_onnx,
    convert_opset_version,
    convert_shared_initializer_to_unique,
    evaluate,
    fix_shapes,
    remove_initializer_from_input,
)

RANDOM = np.random.default_rng(0)
WEIGHT = numpy_helper.from_array(RANDOM.standard_normal((8, 3, 3, 3)).astype(np.float32), "w")
BIAS = numpy_helper.from_array(RANDOM.standard_normal(8).astype(np.float32), "b")
SECOND = numpy_helper.from_array(RANDOM.standard_normal((8, 8, 3, 3)).astype(np.float32), "w2")
CONV = helper.make_node("Conv", ["x", "w", "b"], ["c"], name="conv", pads=[1, 1, 1, 1])


def info(name, shape, kind=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, kind, shape)


def constant(name, *values):
    return numpy_helper.from_array(np.array(values, np.int64), name)


def make(nodes, inputs, outputs, constants=(), opset=17, ir_version=8, declared=()):
    graph = helper.make_graph(nodes, "g", inputs, outputs, [WEIGHT, BIAS, *constants], value_info=list(declared))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version)


def conv_relu(batch="N", side="S", **options):
    return make(
        [CONV, helper.make_node("Relu", ["c"], ["y"], name="relu")],
        [info("x", [batch, 3, side, side])],
        [info("y", [batch, 8, side, side])],
        declared=[info("c", [batch, 8, "h", "w"])],
        **options,
    )


def shapes(infos):
    return {
        info.name: [dim.dim_value if dim.HasField("dim_value") else "?" for dim in info.type.tensor_type.shape.dim]
        for info in infos
    }


def outputs_of(model, **feeds):
    return open_session(model).run(None, feeds)


IMAGE = RANDOM.standard_normal((2, 3, 8, 8)).astype(np.float32)


class TestFixedShapes:
    def test_inputs_are_fixed_and_the_rest_follows(self):
        model = convert_dynamic_to_fixed.fix_shapes(conv_relu(), "x:[2,3,8,8]")
        assert convert_dynamic_to_fixed.get_input_shapes(model) == {"x": [2, 3, 8, 8]}
        assert convert_dynamic_to_fixed.get_output_shapes(model) == {"y": [2, 8, 8, 8]}
        assert shapes(model.graph.value_info) == {"c": [2, 8, 8, 8]}
        np.testing.assert_array_equal(*outputs_of(conv_relu(), x=IMAGE), *outputs_of(model, x=IMAGE))

    @pytest.mark.parametrize(
        ("text", "fragments"),
        [
            ("x:[2,3", ("x:[2,3", "NAME:[SIZE")),
            ("z:[2,3,8,8]", ("'z'", "x")),
            ("x:[2,4,8,8]", ("[2, 4, 8, 8]", "'x'")),
            ("x:[2,3,8]", ("[2, 3, 8]", "'x'")),
        ],
    )
    def test_wrong_shapes(self, text, fragments):
        with pytest.raises(InvalidValueError) as error:
            convert_dynamic_to_fixed.fix_shapes(conv_relu(), text)
        assert all(fragment in str(error.value) for fragment in fragments)

    def test_every_tensor_gets_a_shape_where_inference_fails_by_a_run(self):
        nodes = [
            CONV,
            helper.make_node("Shape", ["c"], ["s"]),
            helper.make_node("ReduceProd", ["s"], ["n"], keepdims=1),
            helper.make_node("Reshape", ["c", "n"], ["r"]),  # ONNX's inference does not follow the product
            helper.make_node("Relu", ["r"], ["y"]),
        ]
        model = make(nodes, [info("x", ["N", 3, 8, 8])], [info("y", ["M"])])
        fixed = fix_shapes.fix_input_and_output_shapes(model, "x:[2,3,8,8]; y:[1024]")
        found = fix_shapes.infer_all_tensors_shape(fixed)
        assert found == {"c": (2, 8, 8, 8), "s": (4,), "n": (1,), "r": (1024,), "y": (1024,)}
        saved = fix_shapes.save_all_tensors_shape(fixed, found)
        assert shapes(saved.graph.output) == {"y": [1024]}
        assert {name: tuple(shape) for name, shape in shapes(saved.graph.value_info).items()} | {"y": (1024,)} == found
        assert {each.type.tensor_type.elem_type for each in saved.graph.value_info} == {1, 7}

    def test_sizes_that_depend_on_the_data_stay_open(self, tmp_path, caplog):
        nodes = [
            helper.make_node("NonZero", ["x"], ["nz"], name="nonzero"),
            helper.make_node("Transpose", ["nz"], ["y"], perm=[1, 0]),
            helper.make_node("Cast", ["y"], ["f"], to=1),
            helper.make_node("ReduceMax", ["f"], ["z"], axes=[0], keepdims=1),
            helper.make_node("NonMaxSuppression", ["boxes", "scores"], ["sel"], name="nms"),
        ]
        ports = [info("x", [4, 5]), info("boxes", [1, 6, 4]), info("scores", [1, 1, 6])]
        model = make(nodes, ports, [info("y", ["K", 2], 7), info("z", [1, 2]), info("sel", ["J", 3], 7)])
        onnx.save(model, tmp_path / "m.onnx")
        words = ["--input_model_path", str(tmp_path / "m.onnx"), "--output_model_path", str(tmp_path / "o.onnx")]
        fix_shapes.fix_shapes(fix_shapes.parse_args(words))
        fixed = onnx.load(tmp_path / "o.onnx")
        assert shapes(fixed.graph.output) == {"y": ["?", 2], "z": [1, 2], "sel": ["?", 3]}
        assert "nonzero" in caplog.text
        assert fix_shapes.find_nms(fixed) == ["nms"]

    def test_free_sizes_and_impossible_outputs(self):
        with pytest.raises(InvalidValueError, match=r"input 'x'.*--fix_shapes"):
            fix_shapes.infer_all_tensors_shape(conv_relu())
        with pytest.raises(InvalidValueError, match=r"\[1, 8, 9, 8\] for output 'y', which is \[1, 8, 8, 8\]"):
            fix_shapes.fix_input_and_output_shapes(conv_relu(), "x:[1,3,8,8];y:[1,8,9,8]")

    def test_random_data_is_that_of_amd(self):
        expected = np.random.RandomState(42).random_sample((2, 3, 8, 8)).astype(np.float32)
        found = fix_shapes.generate_random_data(conv_relu(2, 8))
        np.testing.assert_array_equal(found["x"], expected)


class TestChannelsLast:
    def test_inputs_and_outputs_are_transposed(self):
        model = conv_relu("N", 8)
        changed = convert_nchw_to_nhwc.convert_nchw_to_nhwc(conv_relu("N", 8))
        assert shapes(changed.graph.input) == {"x": ["?", 8, 8, 3]}
        assert shapes(changed.graph.output) == {"y_transpose": ["?", 8, 8, 8]}
        assert [node.op_type for node in changed.graph.node] == ["Transpose", "Conv", "Relu", "Transpose"]
        (expected,), (found,) = outputs_of(model, x=IMAGE), outputs_of(changed, x=IMAGE.transpose(0, 2, 3, 1))
        np.testing.assert_array_equal(found, expected.transpose(0, 2, 3, 1))

    def test_a_quantized_output_stays_quantized_also_per_channel(self):
        scales = numpy_helper.from_array(np.linspace(0.01, 0.08, 8, dtype=np.float32), "s")
        zeros = numpy_helper.from_array(np.zeros(8, np.int8), "z")
        nodes = [
            CONV,
            helper.make_node("QuantizeLinear", ["c", "s", "z"], ["q"]),
            helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"]),
        ]
        ports = [info("x", [2, 3, 8, 8])], [info("y", [2, 8, 8, 8])]
        changed = convert_nchw_to_nhwc.convert_nchw_to_nhwc(make(nodes, *ports, [scales, zeros]))
        assert [node.op_type for node in changed.graph.node[-3:]] == ["Transpose", "QuantizeLinear", "DequantizeLinear"]
        assert [each.name for each in changed.graph.output] == ["y_transpose_DequantizeLinear"]
        (expected,) = outputs_of(make(nodes, *ports, [scales, zeros]), x=IMAGE)
        (found,) = outputs_of(changed, x=IMAGE.transpose(0, 2, 3, 1))
        np.testing.assert_array_equal(found, expected.transpose(0, 2, 3, 1))


class TestOpset:
    def test_newer_and_with_functions(self):
        nodes = [CONV, helper.make_node("Twice", ["c"], ["t"], domain="mine")]
        nodes += [
            helper.make_node("Unsqueeze", ["t"], ["u"], axes=[0]),
            helper.make_node("Squeeze", ["u"], ["y"], axes=[0]),
        ]
        ports = [info("x", [2, 3, 8, 8])], [info("y", [2, 8, 8, 8])]
        model = make(nodes, *ports, opset=12)
        body = [helper.make_node("Add", ["a", "a"], ["b"])]
        opsets = [helper.make_opsetid("", 12)]
        model.functions.append(helper.make_function("mine", "Twice", ["a"], ["b"], body, opsets))
        model.opset_import.append(helper.make_opsetid("mine", 1))
        changed = convert_opset_version.convert_opset_version(model, 13)
        assert changed.opset_import[0].version == 13
        assert [function.name for function in changed.functions] == ["Twice"]
        np.testing.assert_array_equal(*outputs_of(model, x=IMAGE), *outputs_of(changed, x=IMAGE))

    def test_what_the_converter_cannot_do(self):
        with pytest.raises(ModelError, match=r"opset 17, and .* cannot bring it to 11: .*Relu 'relu'"):
            convert_opset_version.convert_opset_version(conv_relu(), 11)
        with pytest.raises(InvalidValueError, match="opset 99"):
            convert_opset_version.convert_opset_version(conv_relu(), 99)


class TestInitializers:
    def model(self, **options):
        nodes = [
            CONV,
            helper.make_node("Conv", ["c", "w2", "b"], ["d"], pads=[1] * 4),
            helper.make_node("Conv", ["d", "w2", "b"], ["e"], pads=[1] * 4),
            helper.make_node("Mul", ["e", "k"], ["duplicatedb2"]),  # a name that a copy would get
            helper.make_node("Add", ["duplicatedb2", "k"], ["y"]),
        ]
        k = numpy_helper.from_array(np.float32(0.5), "k")
        return make(nodes, [info("x", [2, 3, 8, 8])], [info("y", [2, 8, 8, 8])], [SECOND, k], **options)

    def test_every_reader_has_its_own(self):
        changed = convert_shared_initializer_to_unique.convert(self.model())
        onnx.checker.check_model(changed)
        assert [list(node.input[1:]) for node in changed.graph.node] == [
            ["w", "b"],
            ["w2", "duplicatedb2_2"],
            ["duplicatedw22", "duplicatedb3"],
            ["k"],
            ["duplicatedk2"],
        ]
        np.testing.assert_array_equal(*outputs_of(self.model(), x=IMAGE), *outputs_of(changed, x=IMAGE))

    def test_only_some_operators_or_biases(self):
        changed = convert_shared_initializer_to_unique.convert(self.model(), ["Mul", "Add"], "own_")
        assert [each.name for each in changed.graph.initializer] == ["w", "b", "w2", "k", "own_k2"]
        changed = convert_shared_initializer_to_unique.convert(self.model(), ["Conv"], "own_", True)
        assert [each.name for each in changed.graph.initializer] == ["w", "b", "w2", "k", "own_b2", "own_b3"]

    def test_initializers_that_a_caller_may_replace_stay_shared(self):
        model = self.model()
        model.graph.input.append(info("b", [8]))
        changed = convert_shared_initializer_to_unique.convert(model, ["Conv"])
        assert [node.input[2] for node in changed.graph.node[:3]] == ["b"] * 3

    def test_names_of_operators_on_the_command_line(self, tmp_path):
        onnx.save(self.model(), tmp_path / "m.onnx")
        words = [
            "--input",
            str(tmp_path / "m.onnx"),
            "--output",
            str(tmp_path / "o.onnx"),
            "--op_types",
            '["Mul",',
            '"Add"]',
        ]
        convert_shared_initializer_to_unique.TOOL.run(words)
        changed = onnx.load(tmp_path / "o.onnx")
        assert [each.name for each in changed.graph.initializer] == ["w", "b", "w2", "k", "duplicatedk2"]

    def test_initializers_are_no_inputs(self, tmp_path):
        model = conv_relu(2, 8, opset=9, ir_version=3)
        model.graph.input.extend([info("w", [8, 3, 3, 3]), info("b", [8])])
        onnx.save(model, tmp_path / "m.onnx")
        words = ["--input", str(tmp_path / "m.onnx"), "--output", str(tmp_path / "o.onnx")]
        remove_initializer_from_input.remove_initializer_from_input(remove_initializer_from_input.parse_args(words))
        changed = onnx.load(tmp_path / "o.onnx")
        assert ([each.name for each in changed.graph.input], changed.ir_version) == (["x"], 7)
        np.testing.assert_array_equal(*outputs_of(model, x=IMAGE), *outputs_of(changed, x=IMAGE))


ANNOUNCED = (
    'graph { node { op_type: "Relu" input: "x" output: "y" } input { name: "x" } output { name: "y" } '
    'initializer { name: "w" dims: 1000000000000 data_type: 1 raw_data: "ab" } } opset_import { version: 17 }'
)


class TestText:
    def run(self, text, tmp_path):
        (tmp_path / "m.txt").write_text(text)
        words = ["--input_model", str(tmp_path / "m.txt"), "--output_model", str(tmp_path / "o.onnx")]
        convert_onnxtxt_to_onnx.run_main(words)

    def test_there_and_back(self, tmp_path):
        onnx.save(conv_relu(), tmp_path / "m.onnx")
        words = ["--input_model", str(tmp_path / "m.onnx"), "--output_model", str(tmp_path / "m.txt")]
        convert_onnx_to_onnxtxt.run_main(words)
        self.run((tmp_path / "m.txt").read_text(), tmp_path)
        assert onnx.load(tmp_path / "o.onnx") == conv_relu()

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "not a model",
            "graph { node { attribute { g { " + "node { attribute { g { " * 3000,
            "graph { node { attribute { g { " + "node { attribute { g { " * 60 + "}}}" * 60 + "}}}}",
            ANNOUNCED,
        ],
        ids=["empty", "words", "nested", "levels", "announced"],
    )
    def test_a_hostile_file_is_one_line_and_no_output(self, text, tmp_path):
        with pytest.raises(SystemExit) as error:
            self.run(text, tmp_path)
        assert str(error.value.code).startswith("Error: ")
        assert "m.txt" in str(error.value.code)
        assert "\n" not in str(error.value.code)
        assert [path.name for path in tmp_path.iterdir()] == ["m.txt"]


class TestEvaluate:
    def test_ssim_is_the_definition_position_by_position(self):
        first = RANDOM.integers(0, 256, (13, 12)).astype(np.uint8)
        second = np.clip(first + RANDOM.normal(0, 9, first.shape), 0, 255).astype(np.uint8)
        places = np.arange(11) - 5
        window = np.exp(-(places[:, None] ** 2 + places**2) / (2 * 1.5**2))
        window /= window.sum()
        expected = []
        for row in range(3):
            for column in range(2):
                y, z = (value[row : row + 11, column : column + 11].astype(float) for value in (first, second))
                my, mz = (window * y).sum(), (window * z).sum()
                vy, vz = (window * (y - my) ** 2).sum(), (window * (z - mz) ** 2).sum()
                cov = (window * (y - my) * (z - mz)).sum()
                c1, c2 = 2.55**2, 7.65**2
                expected.append((2 * my * mz + c1) * (2 * cov + c2) / ((my**2 + mz**2 + c1) * (vy + vz + c2)))
        found = evaluate.calculate_ssim(first, second)
        assert isinstance(found, np.ndarray)
        assert found == pytest.approx(np.mean(expected), abs=1e-12)
        colours = np.stack([first, first, second], -1), np.stack([first, second, second], -1)
        assert evaluate.calculate_ssim(*colours) == pytest.approx((2 + np.mean(expected)) / 3, abs=1e-12)

    def test_psnr(self):
        reference, noisy = np.array([[0.0, 100.0]]), np.array([[1.0, 99.0]])
        assert evaluate.calculate_psnr(reference, noisy) == pytest.approx(40.0)
        assert evaluate.calculate_psnr(reference, reference) == pytest.approx(140.0)  # as if the error were 1e-10

    def test_two_folders(self, tmp_path, capsys):
        for name in ("float", "quantized"):
            (tmp_path / name).mkdir()
        image = np.full((16, 16, 3), 200, np.uint8)
        changed = image.copy()
        changed[0, 0, 0] = 203
        Image.fromarray(image).save(tmp_path / "float" / "a.png")
        Image.fromarray(changed).save(tmp_path / "quantized" / "a.png")
        np.save(tmp_path / "float" / "b.npy", np.array([[3.0, 4.0]]))
        np.save(tmp_path / "quantized" / "b.npy", np.array([[4.0, 3.0]]))
        Image.fromarray(image).save(tmp_path / "float" / "missing.png")
        evaluate.TOOL.run([str(tmp_path / "float"), str(tmp_path / "quantized")])
        lines = capsys.readouterr().out.splitlines()
        assert "missing.png" in lines[0]
        found = {key: float(value) for key, value in (line.split(": ") for line in lines[1:])}
        assert found["Min cos similarity"] == pytest.approx(0.96)
        assert found["Max l2 distance"] == pytest.approx(3.0)
        assert found["Mean l2 distance"] == pytest.approx((3 + 2**0.5) / 2)
        assert found["Min psnr"] == pytest.approx(10 * np.log10(16))

    def test_folders_that_do_not_fit(self, tmp_path):
        with pytest.raises(InvalidValueError, match="no such folder"):
            evaluate.main(str(tmp_path), str(tmp_path / "none"))
        with pytest.raises(InvalidValueError, match="no file in both"):
            evaluate.main(str(tmp_path), str(tmp_path))
        (tmp_path / "q").mkdir()
        np.save(tmp_path / "a.npy", np.zeros(3))
        np.save(tmp_path / "q" / "a.npy", np.zeros(4))
        with pytest.raises(InvalidValueError, match=r"a.npy.*\[3\] and \[4\]"):
            evaluate.main(str(tmp_path), str(tmp_path / "q"))
