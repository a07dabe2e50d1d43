"""Small programs on model files under AMD's names and flags: `python -m quark.onnx.tools.NAME`, or `quark convert`.

A tool reads a model, calls one function of quark.onnx.convert (or of another folder), and writes the result.
"""

from collections.abc import Mapping
from types import MappingProxyType

# purpose -> modules of this folder, each with a TOOL, in the order in which `quark convert` lists them
TOOLS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "number types": (
            "convert_fp32_to_fp16",
            "convert_fp16_to_fp32",
            "convert_fp32_to_bf16",
            "convert_fp16_to_bf16",
            "convert_fp32_to_bfp16",
            "convert_fp16_to_bfp16",
            "remove_bf16_cast",
            "replace_bfloat16_qdq_cast",
            "insert_clip_bfloat16_qdq",
            "replace_inf_weights",
        ),
        "quantizers": (
            "random_quantize",
            "convert_quant_to_float",
            "remove_qdq",
            "remove_qdq_between_ops",
            "remove_qdq_mul_add",
            "convert_qdq_to_qop",
            "convert_customqdq_to_qdq",
            "convert_custom_ops",
            "convert_for_cpu",
            "convert_a8w8_npu_to_a8w8_cpu",
            "convert_s8s8_to_u8s8",
            "convert_u16s8_to_s16s8",
            "convert_u16u8_to_u8u8",
            "convert_bias_int32_to_int16",
            "convert_resize_fs_to_pof2s",
            "convert_lstm_to_customlstm",
        ),
        "shapes and layout": (
            "convert_dynamic_to_fixed",
            "fix_shapes",
            "convert_nchw_to_nhwc",
            "convert_opset_version",
            "convert_shared_initializer_to_unique",
            "remove_initializer_from_input",
        ),
        "files": ("convert_onnx_to_onnxtxt", "convert_onnxtxt_to_onnx"),
        "inspection": ("evaluate", "save_tensor_hist", "save_weights_hist", "print_a16w8_a8w8_nodes"),
    }
)
