"""Small transformers, built node by node in the forms that exporters write."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
from onnx_models import Net, gelu_erf

VOCABULARY, POSITIONS, BATCH = 11, 5, 2


@dataclass
class Transformer:
    """Two pre-norm layers between an embedding and a head, which share their weight if `is_tied`.

    `norm`: layer (LayerNormalization with a bias), layer_parts, rms (RMSNormalization), rms_parts.
    `has_one_projection`: queries, keys and values are the columns of one product, as in GPT-2.
    """

    norm: str = "rms_parts"
    width: int = 24
    heads: int = 3
    key_heads: int = 3
    is_tied: bool = False
    has_one_projection: bool = False
    is_post_norm: bool = False
    has_layer_scale: bool = False

    def __post_init__(self) -> None:
        self.net = Net(opset={"layer_parts": 13, "rms": 23}.get(self.norm, 17), seed=3)
        self.head_size = self.width // self.heads

    def model(self) -> onnx.ModelProto:
        net = self.net
        tokens = net.input("tokens", ("batch", "time"), np.int64)
        table = net.weight(VOCABULARY, self.width, name="table")
        x = net.node("Gather", table, tokens, name="embed")
        x = net.node("Add", x, net.weight(1, 1, self.width, name="position"))
        for layer in range(2):
            for part in (self._attention, self._feed_forward):
                if self.is_post_norm:
                    x = self._norm(net.node("Add", part(x, f"{layer}"), x))
                else:
                    x = net.node("Add", x, part(self._norm(x), f"{layer}"))
        x = self._norm(x)
        head = net.node("Transpose", table, perm=[1, 0]) if self.is_tied else net.weight(self.width, VOCABULARY)
        return net.model(net.node("MatMul", x, head, name="head", output="y"))

    def _norm(self, x: str) -> str:
        net, is_layer = self.net, self.norm.startswith("layer")
        gain = net.constant(np.linspace(0.5, 2, self.width, dtype=np.float32))
        if self.norm == "layer":
            return net.node("LayerNormalization", x, gain, net.weight(self.width), axis=-1)
        if self.norm == "rms":
            return net.node("RMSNormalization", x, gain, axis=-1)
        if is_layer:
            return net.node("Add", net.node("Mul", net.normalized(x, [-1]), gain), net.weight(self.width))
        mean = net.reduce("ReduceMean", net.node("Pow", x, net.constant(2.0)), [-1])
        root = net.node("Sqrt", net.node("Add", mean, net.constant(1e-6)))
        return net.node("Mul", gain, net.node("Mul", x, net.node("Div", net.constant(1.0), root)))

    def _linear(self, x: str, name: str, into: int, out: int) -> str:
        product = self.net.node("MatMul", x, self.net.weight(into, out), name=name)
        return self.net.node("Add", product, self.net.weight(out)) if self.norm.startswith("layer") else product

    def _split(self, x: str, heads: int) -> str:
        net = self.net
        parts = net.node("Reshape", x, net.integers([0, 0, heads, self.head_size]))
        return net.node("Transpose", parts, perm=[0, 2, 1, 3])

    def _repeated(self, x: str) -> str:
        """The heads of keys and values as often as queries have them."""
        net, count = self.net, self.heads // self.key_heads
        if count == 1:
            return x
        shape = net.node("Shape", x)
        sizes = [net.node("Gather", shape, net.integers([axis])) for axis in (0, 2)]
        whole = net.node(
            "Concat", sizes[0], net.integers([self.key_heads, count]), sizes[1], net.integers([self.head_size]), axis=0
        )
        wide = net.node("Expand", net.node("Unsqueeze", x, net.integers([2])), whole)
        return net.node("Reshape", wide, net.integers([0, self.heads, -1, self.head_size]))

    def _attention(self, x: str, name: str) -> str:
        net, small = self.net, self.key_heads * self.head_size
        if self.has_one_projection:
            joined = self._linear(x, f"{name}.qkv", self.width, 3 * self.width)
            names = [f"{name}.{part}" for part in "qkv"]
            sizes = net.integers([self.width] * 3)
            q, k, v = net.nodes_of("Split", joined, sizes, axis=-1, outputs=names)
        else:
            q = self._linear(x, f"{name}.q", self.width, self.width)
            k, v = (self._linear(x, f"{name}.{part}", self.width, small) for part in "kv")
        q = self._split(q, self.heads)
        k, v = (self._repeated(self._split(value, self.key_heads)) for value in (k, v))
        scores = net.node("MatMul", q, net.node("Transpose", k, perm=[0, 1, 3, 2]), name=f"{name}.scores")
        weights = net.node("Softmax", net.node("Mul", scores, net.constant(0.3)), axis=-1)
        mixed = net.node("Transpose", net.node("MatMul", weights, v, name=f"{name}.mixed"), perm=[0, 2, 1, 3])
        mixed = net.node("Reshape", mixed, net.integers([0, 0, self.width]))
        return self._scaled(self._linear(mixed, f"{name}.o", self.width, self.width))

    def _feed_forward(self, x: str, name: str) -> str:
        net, wide = self.net, 4 * self.width
        if self.norm.startswith("layer"):
            hidden = gelu_erf(net, self._linear(x, f"{name}.up", self.width, wide))
        else:
            gate = self._linear(x, f"{name}.gate", self.width, wide)
            gate = net.node("Mul", gate, net.node("Sigmoid", gate))
            hidden = net.node("Mul", gate, self._linear(x, f"{name}.up", self.width, wide))
        return self._scaled(self._linear(hidden, f"{name}.down", wide, self.width))

    def _scaled(self, x: str) -> str:
        return self.net.node("Mul", x, self.net.weight(self.width)) if self.has_layer_scale else x


def token_samples(count: int = 4) -> list[dict[str, np.ndarray]]:
    """Random tokens for such a network."""
    random = np.random.default_rng(1)
    return [{"tokens": random.integers(0, VOCABULARY, (BATCH, POSITIONS))} for _ in range(count)]
