"""The account of one quantization: what was done to which file, with what, why, and how well it came out.

The value that tables, JSON and pages are made of. It holds nothing that differs from run to run.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from quark.fidelity import OutputFidelity, Verdict, overall_verdict
from quark.measures import MeasureResult
from quark.mixed_precision import MixedPlan
from quark.plan import QuantizationPlan, Role, SkippedNode


@dataclass(frozen=True)
class FileFacts:
    """A model file: its name without folders, its size including external data, and a hash of its content.

    Without external data, `sha256` is the SHA-256 of the file. With external data, it is the SHA-256 of the bytes of
    the model file followed by the SHA-256 digests (32 bytes each) of the external files, sorted by path.
    """

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class CalibrationFacts:
    """What the ranges came from. `samples` were calibrated on, `held_out` were kept for the verdict."""

    source: str
    samples: int
    held_out: int
    methods: tuple[str, ...] = ()
    is_random: bool = False
    is_verdict_on_calibration: bool = False
    is_verdict_skipped: bool = False  # for want of memory: a remark says how much


@dataclass(frozen=True)
class Rewrite:
    """A graph rewrite that found something to do."""

    name: str
    count: int


@dataclass(frozen=True)
class AlgorithmFacts:
    """What an accuracy algorithm did: a phrase for each change, and the nodes that it left, with the reason. Nothing
    changed means that it found nothing to do, and is said so."""

    name: str
    changed: tuple[str, ...]
    left: tuple[SkippedNode, ...] = ()


@dataclass(frozen=True)
class ProtectedLayer:
    """A layer that protection gave a wider type, why, and its share of the network's multiply-accumulates."""

    node: str
    op_type: str
    type: str
    reason: str
    mac_share: float


@dataclass(frozen=True)
class ProtectionFacts:
    """What was done to keep a network usable in 8 bits.

    `structures` are nodes in float because of their form, `layers` those that measuring found. `methods` count the
    tensors by the calibration method that was chosen for them, if the configured one was not kept for all.
    `float_mac_share` is the share of multiply-accumulates that are not in 8 bits, and `extra_weight_bytes` what their
    weights add to the file. `before` and `after` are verdicts with the part that decides them; `tried` has every trial,
    and `alternatives` the wider presets that were measured to be ok, if 8 bits are not.
    """

    structures: tuple[str, ...] = ()
    layers: tuple[ProtectedLayer, ...] = ()
    is_float_between_products: bool = False
    methods: Mapping[str, int] = field(default_factory=dict)
    float_mac_share: float = 0.0
    extra_weight_bytes: int = 0
    before: str = ""
    after: str = ""
    tried: tuple[str, ...] = ()
    alternatives: tuple[str, ...] = ()


@dataclass(frozen=True)
class PackingFacts:
    """That weights lie in the file in the bits of their formats: how many do, and bits for each of their numbers."""

    profile: str
    weights: int
    bits_per_weight: float


@dataclass(frozen=True)
class Report:
    """Everything about one run."""

    config_name: str
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    source: FileFacts
    result: FileFacts | None
    plan: QuantizationPlan
    calibration: CalibrationFacts
    outputs: tuple[OutputFidelity, ...] = ()
    rewrites: tuple[Rewrite, ...] = ()
    algorithms: tuple[AlgorithmFacts, ...] = ()
    remarks: tuple[str, ...] = ()
    op_types: Mapping[str, str] = field(
        default_factory=dict
    )  # node name to operator, of every node that was there to quantize
    mixed: MixedPlan | None = None  # where layers were chosen to have lower types
    protection: ProtectionFacts | None = None  # where something was protected
    packing: PackingFacts | None = None
    measure: MeasureResult | None = None  # by the user's metric, where one was given
    auto: Mapping[str, Any] = field(default_factory=dict)  # what `--config auto` tried, as JSON has it
    card: Mapping[str, Any] = field(default_factory=dict)  # how to make it again: quark.card.Card, as JSON has it

    @property
    def verdict(self) -> Verdict:
        return overall_verdict(self.outputs)

    @property
    def quantized_nodes(self) -> tuple[str, ...]:
        """The nodes that take part in quantization: all but the skipped ones."""
        skipped = {each.node for each in self.plan.skipped}
        return tuple(name for name in self.op_types if name not in skipped)

    def formats(self, role: Role) -> dict[str, int]:
        """How many tensors of that role have which format; per channel and per tensor told apart."""
        return dict(Counter(str(each.choice) for each in self.plan if each.role is role))

    def to_json(self) -> str:
        """All of it, as text."""
        plan = json.loads(self.plan.to_json())
        content = {
            "verdict": self.verdict.value,
            "outputs": [output.to_dict() for output in self.outputs],
            "measure": self.measure.to_dict() if self.measure else None,
            "source": asdict(self.source),
            "result": asdict(self.result) if self.result else None,
            "config_name": self.config_name,
            "config": dict(self.config),
            "versions": dict(self.versions),
            "calibration": asdict(self.calibration),
            "rewrites": [asdict(each) for each in self.rewrites],
            "algorithms": [asdict(each) for each in self.algorithms],
            "mixed_precision": self.mixed.to_dict() if self.mixed else None,
            "protection": asdict(self.protection) if self.protection else None,
            "remarks": list(self.remarks),
            "quantized_nodes": [
                {"node": name, "op_type": self.op_types.get(name, "")} for name in self.quantized_nodes
            ],
            "packing": asdict(self.packing) if self.packing else None,
            "auto": dict(self.auto) or None,
            "card": dict(self.card) or None,
            "plan_sha256": self.plan.digest,
            "plan": plan,
        }
        return json.dumps(content, indent=1, allow_nan=False)
