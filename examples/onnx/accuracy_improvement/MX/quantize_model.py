"""Quantize a model with one of the presets, such as MXINT8.

    python quantize_model.py --input_model_path models/resnet50-v1-12.onnx \
                             --output_model_path models/resnet50-v1-12_quantized.onnx \
                             --calibration_dataset_path calib_data --config MXINT8
"""

from quark.cli.example_scripts import quantize_model

if __name__ == "__main__":
    quantize_model()
