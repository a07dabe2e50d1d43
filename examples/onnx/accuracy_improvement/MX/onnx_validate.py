"""Top-1 and top-5 of a model on a folder of class folders.

python onnx_validate.py val_data --batch-size 1 --onnx-input models/resnet50-v1-12_quantized.onnx
"""

from quark.cli.example_scripts import onnx_validate

if __name__ == "__main__":
    onnx_validate()
