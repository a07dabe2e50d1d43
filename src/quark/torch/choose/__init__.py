"""Choose: where quantizers go, and with which numbers. Nothing is changed here."""

from quark.torch.choose.choose import Chosen, Decisions, bias_roundings, choose, tensors_to_observe
from quark.torch.choose.npu_operations import npu_operations
from quark.torch.choose.placement import Placement, Request, place
from quark.torch.choose.planned_specs import with_plan

__all__ = [
    "Chosen",
    "Decisions",
    "Placement",
    "Request",
    "bias_roundings",
    "choose",
    "npu_operations",
    "place",
    "tensors_to_observe",
    "with_plan",
]
