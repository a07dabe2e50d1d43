"""A small network that comes with the package, so that every command has something real to work on.

`digits_mobilenet.onnx` is a MobileNet-V2 in miniature, trained on the 8x8 digits of scikit-learn by
`python -m quark.demo.train`. What it expects and how well it does is in the file's metadata.
"""

from quark.demo.network import load_network, network_metadata, network_path

__all__ = ["load_network", "network_metadata", "network_path"]
