"""Mixed precision: which layers keep the higher types, and which get the lower ones. Numbers and names only, no graph.

plan       what was chosen for every layer, with its sensitivity; a file to read, edit and use again
search     as many layers as possible, while quality lasts
budget     as little harm as possible, within a budget
"""

from quark.mixed_precision.budget import least_harm, least_harm_greedy
from quark.mixed_precision.figures import DEFAULT_SQNR_DB, Figure, Metric
from quark.mixed_precision.plan import LayerPrecision, MixedPlan, Precision
from quark.mixed_precision.search import Trial, lower_most, rising

__all__ = [
    "DEFAULT_SQNR_DB",
    "Figure",
    "LayerPrecision",
    "Metric",
    "MixedPlan",
    "Precision",
    "Trial",
    "least_harm",
    "least_harm_greedy",
    "lower_most",
    "rising",
]
