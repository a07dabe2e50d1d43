"""All 37 tools exist under AMD's names, take AMD's arguments, and have AMD's functions."""

import re
import sys
from importlib import import_module
from runpy import run_module

import pytest

from quark.onnx.tools import TOOLS

# a command line with every flag, and the functions
SURFACE = {
    "convert_a8w8_npu_to_a8w8_cpu": (
        "m.onnx o.onnx",
        "parse_args convert_a8w8_npu_to_a8w8_cpu",
    ),
    "convert_bias_int32_to_int16": (
        "--input_model_path m.onnx --output_model_path o.onnx --save_as_external_data",
        "parse_args convert_bias_int32_to_int16",
    ),
    "convert_custom_ops": (
        "--input_model m.onnx --output_model o.onnx --reverse_conversion True --external_data True",
        "convert_custom_ops run_main",
    ),
    "convert_customqdq_to_qdq": (
        "--input_model m.onnx --output_model o.onnx",
        "convert_customqdq_to_qdq custom_ops_infer_shapes run_main",
    ),
    "convert_dynamic_to_fixed": (
        "--fix_shapes x:[1,3,8,8] m.onnx o.onnx",
        "get_input_shapes get_output_shapes fix_shapes convert_dynamic_to_fix",
    ),
    "convert_fp16_to_bf16": (
        "--input m.onnx --output o.onnx --format with_cast --save_as_external_data",
        "parse_args add_fp16_input_output_cast convert",
    ),
    "convert_fp16_to_bfp16": (
        "m.onnx o.onnx --save_as_external_data",
        "parse_args convert_fp16_to_bfp16 convert",
    ),
    "convert_fp16_to_fp32": (
        "--input m.onnx --output o.onnx --save_as_external_data --subgraphs_to_include a b",
        "parse_args convert",
    ),
    "convert_fp32_to_bf16": (
        "--input m.onnx --output o.onnx --format with_cast --save_as_external_data",
        "parse_args convert",
    ),
    "convert_fp32_to_bfp16": (
        "m.onnx o.onnx --save_as_external_data",
        "parse_args convert_fp32_to_bfp16 convert",
    ),
    "convert_fp32_to_fp16": (
        (
            "m.onnx o.onnx --keep_io_types --disable_shape_infer --save_as_external_data "
            "--all_tensors_to_one_file --not_simplify"
        ),
        "parse_args convert",
    ),
    "convert_lstm_to_customlstm": (
        "--input_model m.onnx --output_model o.onnx",
        "convert_lstm_to_customlstm custom_ops_infer_shapes run_main",
    ),
    "convert_nchw_to_nhwc": (
        "m.onnx o.onnx",
        "parse_args",
    ),
    "convert_onnx_to_onnxtxt": (
        "--input_model m.onnx --output_model o.onnx",
        "run_main",
    ),
    "convert_onnxtxt_to_onnx": (
        "--input_model m.onnx --output_model o.onnx",
        "run_main",
    ),
    "convert_opset_version": (
        "m.onnx 17 o.onnx",
        "parse_args convert_opset_version",
    ),
    "convert_qdq_to_qop": (
        "--input_model m.onnx --output_model o.onnx",
        "convert_qdq_to_qop run_main",
    ),
    "convert_quant_to_float": (
        "m.onnx o.onnx",
        "convert_initializers_to_float remove_quantize_dequantize_nodes convert_quant_to_float parse_args",
    ),
    "convert_resize_fs_to_pof2s": (
        "--input_model m.onnx --output_model o.onnx",
        "scale2pos pos2scale fs_to_pof2s convert_resize_fs_to_pof2s parse_args main",
    ),
    "convert_s8s8_to_u8s8": (
        "m.onnx o.onnx",
        "parse_args convert_s8s8_to_u8s8 convert",
    ),
    "convert_shared_initializer_to_unique": (
        "--input m.onnx --output o.onnx --op_types Conv Gemm",
        "parse_args convert",
    ),
    "convert_u16s8_to_s16s8": (
        "m.onnx o.onnx",
        "parse_args convert_u16s8_to_s16s8 convert",
    ),
    "convert_u16u8_to_u8u8": (
        "m.onnx o.onnx",
        "parse_args convert_u16u8_to_u8u8 convert",
    ),
    "evaluate": (
        "float quantized",
        "parse_args calculate_ssim calculate_psnr main",
    ),
    "fix_shapes": (
        "--input_model_path m.onnx --output_model_path o.onnx --fix_shapes x:[1,3];y:[1] --save_as_external_data",
        (
            "parse_input_and_output_shapes fix_input_and_output_shapes generate_random_data "
            "infer_all_tensors_shape save_all_tensors_shape find_nms parse_args fix_shapes"
        ),
    ),
    "insert_clip_bfloat16_qdq": (
        "--input_model m.onnx --output_model o.onnx",
        "insert_clip_bfloat16_qdq main",
    ),
    "print_a16w8_a8w8_nodes": (
        "m.onnx",
        "parse_args a16w8_a8w8_nodes print_a16w8_a8w8_nodes",
    ),
    "random_quantize": (
        (
            "--input_model_path m.onnx --quantized_model_path o.onnx --config XINT8 --exclude_nodes a;b "
            "--exclude_subgraphs [a],[b] --save_as_external_data"
        ),
        "parse_args parse_subgraphs_list main",
    ),
    "remove_bf16_cast": (
        "m.onnx o.onnx --save_as_external_data",
        (
            "get_input_tensor_to_node_dict remove_couples_of_cast float32_to_bfloat16 "
            "convert_bf16_cast_to_fp32_weights remove_output_cast parse_args remove_bf16_cast"
        ),
    ),
    "remove_initializer_from_input": (
        "--input m.onnx --output o.onnx",
        "parse_args remove_initializer_from_input",
    ),
    "remove_qdq": (
        "--input_model m.onnx --output_model o.onnx",
        "remove_qdq run_main",
    ),
    "remove_qdq_between_ops": (
        "--input_model m.onnx --output_model o.onnx --between_ops Conv,Relu;Add,Mul",
        "remove_qdq_between_ops find_node_by_output main",
    ),
    "remove_qdq_mul_add": (
        "--input_model m.onnx --output_model o.onnx",
        "remove_qdq_mul_add find_node_by_output main",
    ),
    "replace_bfloat16_qdq_cast": (
        "--input_model m.onnx --output_model o.onnx",
        "replace_bfloat16_qdq_cast main",
    ),
    "replace_inf_weights": (
        "--input_model m.onnx --output_model o.onnx --replace_inf_value 1000",
        "replace_inf_in_onnx_weights",
    ),
    "save_tensor_hist": (
        "--input_model m.onnx --data_path data --output_path out",
        (
            "load_raw_data load_npy_data load_img_data load_img_data2 load_data load_raw_data_by_input_name "
            "load_data_by_input_name HistDataReader save_figure save_tensor_hist_figure get_tensor_hist"
        ),
    ),
    "save_weights_hist": (
        "--input_model m.onnx --output out --perchannel",
        "sanitize_filename main",
    ),
}


def test_there_are_37_and_those_that_amd_does_not_have():
    assert len(SURFACE) == 37
    assert sorted([*SURFACE, "convert_for_cpu"]) == sorted(name for names in TOOLS.values() for name in names)


@pytest.mark.parametrize("name", SURFACE)
def test_arguments_and_functions(name):
    words, functions = SURFACE[name]
    module = import_module(f"quark.onnx.tools.{name}")
    args = vars(module.TOOL.parse_args(words.split()))
    flags = re.findall(r"--(\w+)", words)
    assert set(flags) <= set(args)
    with pytest.raises(SystemExit):
        module.TOOL.parse_args([*words.split(), "--no_such_flag"])
    missing = [part for part in functions.split() if not callable(getattr(module, part, None))]
    assert not missing
    assert re.fullmatch(r"[A-Z].*\.", module.TOOL.summary)


@pytest.mark.parametrize("name", ["convert_nchw_to_nhwc", "evaluate", "convert_opset_version"])
def test_positional_arguments_may_be_flags_as_in_the_documents(name):
    tool = import_module(f"quark.onnx.tools.{name}").TOOL
    keys = [argument.key for argument in tool.arguments]
    words = SURFACE[name][0].split()
    mixed = [word for key, value in zip(keys, words, strict=True) for word in (f"--{key}", value)]
    assert tool.parse_args(mixed) == tool.parse_args(words)


@pytest.mark.filterwarnings("ignore:.*found in sys.modules.*:RuntimeWarning")
def test_a_tool_as_a_program(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["convert_opset_version", "missing.onnx", "17", "o.onnx"])
    with pytest.raises(SystemExit) as error:
        run_module("quark.onnx.tools.convert_opset_version", run_name="__main__")
    assert error.value.code == "Error: no such file: 'missing.onnx'. Expected an ONNX model"
