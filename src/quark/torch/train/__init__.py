"""Train: the modules that a quantized network is made of."""

from quark.torch.train.conv_batch_norm import ConvBatchNorm, LinearOperation
from quark.torch.train.networks import FrozenNetwork, QuantizedNetwork
from quark.torch.train.quantizers import Quantizer

__all__ = ["ConvBatchNorm", "FrozenNetwork", "LinearOperation", "QuantizedNetwork", "Quantizer"]
