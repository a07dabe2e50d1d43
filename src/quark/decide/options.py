"""Options that decide which nodes are quantized, for which target, and how."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from quark.decide.end_layers import EndLayers
from quark.decide.specs import AffineSpec, FloatSpec, LayerSpec, TensorSpec
from quark.errors import InvalidValueError


class Target(str, Enum):
    """The target whose integer kernels quantizers are placed for."""

    ONNX_RUNTIME = "onnx_runtime"
    NPU_CNN = "npu_cnn"  # every tensor quantized, nothing between a convolution and its activation
    NPU_TRANSFORMER = "npu_transformer"


class BlockPlacement(str, Enum):
    """Where block formats (and float16, bfloat16) are placed."""

    COMPUTE = "compute"  # on both operands of Conv, Gemm and MatMul; the rest stays float
    ALL = "all"  # on every activation, weight and bias


@dataclass(frozen=True)
class SelectionWords:
    """The names of the options of a selection, as users write them, for errors and reasons."""

    nodes: str = "nodes_to_quantize"
    excluded_nodes: str = "nodes_to_exclude"
    by_node: str = "specific_layer_config"
    extra_op_types: str = "extra_op_types_to_quantize"  # empty if there is no such option
    everywhere: str = "; BlockPlacement 'all' puts them here too"


@dataclass(frozen=True)
class Selection:
    """Which nodes are quantized. Names of nodes may be patterns, which the graph interprets (`Graph.matches`).

    `op_types` None means those that the target quantizes by default. `excluded_subgraphs` are pairs of names, from the
    first nodes to the last; the nodes between them are excluded too. `input_nodes` and `output_nodes` bound what is
    quantized.
    """

    op_types: frozenset[str] | None = None
    extra_op_types: frozenset[str] = frozenset()
    has_all_op_types: bool = False
    nodes: tuple[str, ...] = ()
    excluded_nodes: tuple[str, ...] = ()
    excluded_op_types: frozenset[str] = frozenset()
    excluded_subgraphs: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = ()
    input_nodes: tuple[str, ...] = ()
    output_nodes: tuple[str, ...] = ()
    kept_float: tuple[tuple[str, str], ...] = ()  # nodes that protection leaves in float, with the reason
    has_embeddings: bool = False  # also Gather from a constant table, if one scale is enough for its rows
    needs_constant_matmul_operand: bool = False
    needs_weight_matrix: bool = False  # only two-dimensional weights, as MatMulNBits needs them
    has_bodies: bool = False  # also the bodies of If, Loop and Scan
    words: SelectionWords = field(default_factory=lambda: SelectionWords())

    @property
    def named_op_types(self) -> frozenset[str]:
        """The operator types that the user requests by name."""
        return self.extra_op_types | (self.op_types or frozenset())


@dataclass(frozen=True)
class TensorOverride:
    """What a user fixes for one tensor by name; None leaves it to the rules. `spec` is set if the type is not another
    integer in place of the layer's: blocks, floats, or integers in a layer that has none."""

    tensor: str
    format: str | None = None
    is_symmetric: bool | None = None
    range: tuple[float, float] | None = None
    scale: tuple[float, ...] | None = None
    zero_point: tuple[int, ...] | None = None
    axis: int | None = None
    has_reduced_range: bool | None = None
    spec: TensorSpec | None = None
    has_one_scale: bool = False  # also if weights have a scale for each channel
    converted: TensorOverride | None = None  # what `receivers` see, after the tensor was quantized as said above
    receivers: tuple[str, ...] = ()  # names of nodes; none means all that read the tensor


@dataclass(frozen=True)
class PositionOptions:
    """The NPU's limits on positions: the names of the rules of `quark.npu` that apply, and the number of rounds after
    which contradicting rules are given up."""

    rules: frozenset[str]
    max_rounds: int = 5


@dataclass(frozen=True)
class ChoiceOptions:
    """Everything that decides the plan, apart from the model and its ranges.

    `by_op_type` and `by_node` replace `default` for nodes of a type, or of a name or pattern; None keeps them float.
    `aligned` names the operators whose inputs and outputs share one scale. `fused_activations` are the operators that a
    convolution or Gemm before them is computed with, so that nothing is quantized in between.

    `is_trained`: the network is trained after quantizers were placed. Then only `LayerSpec.output` says how results are
    quantized, and a reader's wish takes precedence over it. float16 and bfloat16 go on every tensor. An activation
    behind a float layer reads float, and constants that are only moved are quantized at their destination.
    """

    default: LayerSpec
    by_op_type: tuple[tuple[str, LayerSpec | None], ...] = ()
    by_node: tuple[tuple[str, LayerSpec | None], ...] = ()
    by_plan: tuple[tuple[str, LayerSpec | None], ...] = ()  # as by_node, with exact names; by_node takes precedence
    overrides: tuple[TensorOverride, ...] = ()
    selection: Selection = field(default_factory=Selection)
    target: Target = Target.ONNX_RUNTIME
    block_placement: BlockPlacement = BlockPlacement.COMPUTE
    aligned: frozenset[str] = frozenset({"Concat", "MaxPool", "Pad", "Slice", "Transpose", "Reshape"})
    fused_activations: frozenset[str] = frozenset({"Relu", "Clip"})
    has_quantized_bias: bool = True
    is_weights_only: bool = False
    op_types_with_float_output: frozenset[str] = frozenset()
    nodes_with_float_output: tuple[str, ...] = ()  # names or patterns of nodes whose outputs nobody reads quantized
    channel_axes: tuple[tuple[str, int], ...] = ()  # op type to the axis of its weight's channels
    unquantized_between: tuple[tuple[str, str], ...] = ()  # (writer, reader) types with nothing quantized in between
    # between layers of two types, a tensor is quantized as its writer has it, then as its reader has it
    has_dual_pairs: bool = False
    has_fused_blocks: bool = False  # no blocks between an operator and its activation, as with integers
    has_lowest_code: bool = False  # symmetric weights of few bits use their lowest code if that is closer
    has_fitted_weights: bool = True  # a weight's scale is raised if its bias would not fit into 32 bits
    has_unsigned_relu: bool = False  # symmetric unsigned tensors that are never negative: zero point 0, the whole range
    has_activation_constants: bool = False  # constants of Add, Sub, Mul, Div, Min, Max have the activation's type
    positions: PositionOptions | None = None  # None: no limits on positions
    has_float_products: bool = False  # Gemm and MatMul return float to nodes in float, also for an NPU's transformers
    has_forced_movers: bool = False  # operators that only move values are quantized even if their input is not
    is_trained: bool = False
    ends: EndLayers | None = None  # wider types for the first and the last layers

    def __post_init__(self) -> None:
        if self.ends is not None:
            self.ends.check(self.default)
        layers = [self.default, *(spec for _, spec in (*self.by_op_type, *self.by_node))]
        for spec in (
            tensor_spec for layer in layers if layer for tensor_spec in (layer.activation, layer.weight, layer.bias)
        ):
            if self.is_trained or not isinstance(spec, AffineSpec) or not spec.is_power_of_two:
                continue
            if not spec.is_symmetric:
                raise InvalidValueError(
                    f"power-of-two scales with asymmetric {spec.format}: positions need a middle zero"
                )
            if spec.is_per_channel or spec.has_reduced_range:
                raise InvalidValueError("power-of-two scales are one for a tensor, of the full range")

    @property
    def has_products_only(self) -> bool:
        """True if block and float formats go only on operands of products, unless all operators were requested."""
        return self.block_placement is BlockPlacement.COMPUTE and not self.selection.has_all_op_types

    def goes_everywhere(self, spec: TensorSpec | None) -> bool:
        """True if the spec applies to every tensor, and not only to the operands of products."""
        if isinstance(spec, AffineSpec):
            return True
        if self.is_trained and isinstance(spec, FloatSpec) and not spec.is_eight_bits:
            return True
        return spec is not None and not self.has_products_only
