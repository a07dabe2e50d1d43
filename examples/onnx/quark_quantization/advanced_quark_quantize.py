"""Quantize a model for the NPU, and see sizes and accuracies before and after.

python advanced_quark_quantize.py --model_input models/mobilenetv2.onnx --model_output models/mobilenetv2_quant.onnx
"""

from quark.cli.example_scripts import advanced_quantize

if __name__ == "__main__":
    advanced_quantize()
