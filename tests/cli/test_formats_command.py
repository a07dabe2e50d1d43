"""`quark formats` as a user meets it."""

import json
import math
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

from quark.cli.main import main
from quark.formats import FORMATS, BlockFormat, FloatFormat

QUARK = Path(sys.executable).with_name("quark")


def run(*arguments):
    return CliRunner().invoke(main, ["formats", *map(str, arguments)])


def rows_of(*arguments):
    result = run("--json", *arguments)
    assert result.exit_code == 0, result.output
    return {row["name"]: row for row in json.loads(result.stdout)["formats"]}


def assert_one_line_error(result, *fragments):
    assert result.exit_code == 1
    assert result.stdout == ""
    assert len(result.stderr.strip().splitlines()) == 1
    for fragment in fragments:
        assert fragment in result.stderr


def save_model(path, nodes, initializers, inputs=(("x", [1, 8]),)):
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs],
        [helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in initializers.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def test_table_has_every_block_format_and_float():
    result = CliRunner(env={"COLUMNS": "120"}).invoke(main, ["formats"])
    assert result.exit_code == 0
    for name, fmt in FORMATS.items():
        if isinstance(fmt, (BlockFormat, FloatFormat)):
            assert name in result.stdout
    assert "int8" in result.stdout
    assert "int13" not in result.stdout
    assert "max-abs" in result.stdout
    assert "nan" not in result.stdout.lower()
    assert "\x1b" not in result.stdout


def test_json_rows_are_complete_and_finite():
    rows = rows_of()
    for name, row in rows.items():
        assert row["bits_per_element"] == FORMATS[name].bits_per_element
        assert row["max"] == FORMATS[name].max
        assert row["smallest_step"] == FORMATS[name].min_subnormal
        assert math.isfinite(row["sqnr_db"])


def test_all_lists_the_whole_catalog():
    assert list(rows_of("--all")) == list(FORMATS)


def test_fidelity_is_ordered_as_the_widths_are():
    rows = {name: row["sqnr_db"] for name, row in rows_of("--all").items()}
    integers = [rows[f"int{bits}"] for bits in range(2, 20)]
    assert integers == sorted(integers)
    assert rows["mx4"] < rows["mx6"] < rows["mx9"]
    assert rows["mxfp4_e2m1"] < rows["mxfp6_e2m3"] < rows["mxint8"]
    assert rows["uint8"] == pytest.approx(rows["int8"], abs=0.5)
    # 6.02 dB a bit: a sign and seven bits of an 8-bit integer
    assert 30 < rows["int8"] < 45


def test_named_formats_only_in_the_order_given():
    assert list(rows_of("mx9", "int13", "mxint8")) == ["mx9", "int13", "mxint8"]


def test_unknown_format():
    assert_one_line_error(run("mxfp4"), "no format 'mxfp4'", "mxfp4_e2m1")


def test_debug_shows_the_error_itself():
    result = CliRunner().invoke(main, ["--debug", "formats", "mxfp4"])
    assert result.exit_code == 1
    assert "Traceback" in result.stderr
    assert "UnknownNameError: no " in result.stderr


@pytest.mark.parametrize("arguments", [["--nonsense"], ["--weights"]])
def test_usage_errors_exit_with_2(arguments):
    assert run(*arguments).exit_code == 2


@pytest.mark.parametrize(
    ("name", "content", "fragment"),
    [
        ("missing.onnx", None, "no such file"),
        ("broken.onnx", b"\xff\xfe nonsense " * 40, "not an ONNX model"),
        ("empty.onnx", b"", "is empty"),
        ("missing.npz", None, "no such file"),
        ("broken.npz", b"PK\x03\x04 nonsense", "cannot be read"),
        ("text.npz", b"not an archive", "cannot be read"),
        ("empty.npz", b"", "cannot be read"),
        ("weights.txt", b"1 2 3", ".onnx or .npz"),
    ],
)
def test_bad_weights_file(tmp_path, name, content, fragment):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    assert_one_line_error(run("--weights", path), name, fragment)


def test_folder_in_place_of_a_weights_file(tmp_path):
    folder = tmp_path / "model.onnx"
    folder.mkdir()
    assert_one_line_error(run("--weights", folder), "not a regular file")


def test_weights_beyond_float32_are_named(tmp_path):
    path = tmp_path / "w.npz"
    np.savez(path, fine=np.ones((2, 2)), bad=np.full((2, 2), 1e300))
    assert_one_line_error(run("--weights", path), "'bad'", "NaN or Inf")


@pytest.mark.parametrize("array", [np.zeros((4, 4), np.float32), np.ones((4, 4), np.int8), np.ones(4, np.float32)])
def test_archive_with_nothing_to_measure(tmp_path, array):
    path = tmp_path / "w.npz"
    np.savez(path, array)
    assert_one_line_error(run("--weights", path), "nothing to measure")


def test_lone_array_under_the_name_of_an_archive(tmp_path):
    np.save(tmp_path / "w.npy", np.ones((4, 4)))
    path = (tmp_path / "w.npy").rename(tmp_path / "w.npz")
    assert_one_line_error(run("--weights", path), "cannot be read")


def test_archive_of_other_files(tmp_path):
    path = tmp_path / "w.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "hello")
    assert_one_line_error(run("--weights", path), "nothing to measure")


def test_archive_of_objects_is_refused(tmp_path):
    path = tmp_path / "w.npz"
    np.savez(path, np.array([[{}]], dtype=object))
    assert_one_line_error(run("--weights", path), "cannot be read")


def test_a_weight_that_nothing_changes_is_exact(tmp_path):
    path = tmp_path / "w.npz"
    np.savez(path, np.ones((4, 32), np.float32))
    row = rows_of("mxfp4_e2m1", "--weights", path)["mxfp4_e2m1"]
    assert row["sqnr_db"] is None
    assert row["note"] == "exact"
    assert "exact" in run("mxfp4_e2m1", "--weights", path).stdout


def test_a_value_pushed_out_of_float32_is_said(tmp_path):
    path = tmp_path / "w.npz"
    np.savez(path, np.full((1, 32), -3.4028235e38, np.float32))
    assert rows_of("mxint8", "--weights", path)["mxint8"]["note"] == "overflow"


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_float_weights_are_measured(tmp_path, dtype):
    path = tmp_path / "w.npz"
    np.savez(path, np.linspace(-1, 1, 256).reshape(4, 64).astype(dtype))
    assert rows_of("int8", "--weights", path)["int8"]["sqnr_db"] > 30


@pytest.mark.parametrize(
    ("op_type", "shape", "attributes", "summed"),
    [
        ("Gemm", (8, 4), {}, 0),
        ("Gemm", (4, 8), {"transB": 1}, 1),
        ("MatMul", (8, 4), {}, 0),
    ],
)
def test_blocks_run_along_the_summed_axis(tmp_path, op_type, shape, attributes, summed):
    """Magnitudes that differ only between outputs cost a block format nothing when its blocks are the right ones."""
    scales = 2.0 ** np.arange(0, 40, 10)
    weight = np.ones(shape, np.float32) * np.expand_dims(scales, summed).astype(np.float32)
    path = tmp_path / "m.onnx"
    save_model(path, [helper.make_node(op_type, ["x", "w"], ["y"], **attributes)], {"w": weight})
    assert rows_of("mxfp4_e2m1", "--weights", path)["mxfp4_e2m1"].get("note") == "exact"


@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_convolution_is_measured(tmp_path, groups):
    outputs = 2.0 ** np.arange(0, 30, 10, dtype=np.float32)
    weight = np.broadcast_to(outputs[None, :, None, None], (4, 3, 2, 2)).copy()
    path = tmp_path / "m.onnx"
    node = helper.make_node("ConvTranspose", ["x", "w"], ["y"], group=groups)
    save_model(path, [node], {"w": weight}, [("x", [1, 4, 5, 5])])
    assert rows_of("mxfp4_e2m1", "--weights", path)["mxfp4_e2m1"].get("note") == "exact"


def test_external_data_that_is_missing(tmp_path):
    path = tmp_path / "m.onnx"
    save_model(path, [helper.make_node("MatMul", ["x", "w"], ["y"])], {"w": np.ones((8, 4), np.float32)})
    onnx.save(
        onnx.load(path), path, save_as_external_data=True, all_tensors_to_one_file=True, location="d", size_threshold=0
    )
    assert rows_of("int8", "--weights", path)
    (tmp_path / "d").unlink()
    assert_one_line_error(run("--weights", path), "m.onnx")


def run_command(*arguments, **environment):
    env = {key: value for key, value in os.environ.items() if key != "COLUMNS"} | environment
    return subprocess.run(
        [QUARK, *arguments], capture_output=True, stdin=subprocess.DEVNULL, env=env, timeout=120, check=False
    )


def test_installed_command_in_a_pipe():
    done = run_command("formats")
    assert done.returncode == 0
    assert done.stderr == b""
    assert b"mxfp4_e2m1" in done.stdout
    assert b"\x1b" not in done.stdout


@pytest.mark.parametrize("columns", [20, 60, 200])
def test_columns_are_respected(columns):
    done = run_command("formats", "mxint8", COLUMNS=str(columns))
    assert done.returncode == 0
    assert max(map(len, done.stdout.decode().splitlines())) <= columns


def test_ascii_terminal():
    done = run_command("formats", PYTHONIOENCODING="ascii", PYTHONUTF8="0", LC_ALL="C")
    assert done.returncode == 0
    done.stdout.decode("ascii")


def test_error_of_the_installed_command():
    done = run_command("formats", "mxint9")
    assert done.returncode == 1
    assert done.stdout == b""
    assert done.stderr.startswith(b"Error: no format 'mxint9'")
    assert b"Traceback" not in done.stderr


def test_version():
    done = run_command("--version")
    assert done.returncode == 0
    assert done.stdout.decode().split()[-1][0].isdigit()
