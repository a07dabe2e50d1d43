"""A small trained network that comes with the package, to try every command on.

`digits_mobilenet.onnx` is a miniature MobileNet-V2, trained on the 8x8 digits of scikit-learn by
`python -m quark.demo.train`. The metadata of the file describe its input and its accuracy.
"""

from quark.demo.network import load_network, network_metadata, network_path

__all__ = ["load_network", "network_metadata", "network_path"]
