"""Quantize ResNet-18 or MobileNet-V2 for the NPU, train it, and see its accuracy before and after.

python quantize.py --model_name=resnet18 --pretrained=./resnet18-f37072fd.pth --qat --non_overflow --data_dir=imagenet
torchrun --nproc-per-node 8 quantize.py --model_name=mobilenetv2 --pretrained=./mobilenet_v2-b0353104.pth --qat --tqt \
         --data_dir=imagenet --model_export onnx
"""

from quark.cli.quantize_torch_command import quantize_torch

if __name__ == "__main__":
    quantize_torch()
