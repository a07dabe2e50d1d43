"""Search for a configuration that is small, accurate and fast enough, cheapest candidates first.

auto_quantize   find and make the best quantized model for a target: `--config auto`
search          try configurations and rank them; resumes after an interruption
Wanted, Budget  what to search for, and among what
Trial           one configuration with its size, drop and latency
pareto_front    the trials that none beats;  ranked   all trials, the best first
"""

from quark.onnx.quantization.targets import Target
from quark.search.auto import AutoResult, Bound, Row, auto_quantize
from quark.search.journal import Keep
from quark.search.searching import FloatFacts, SearchResult, Wanted, search
from quark.search.trial import Budget, Limits, Measurement, Stage, Trial, pareto_front, ranked

__all__ = [
    "AutoResult",
    "Bound",
    "Budget",
    "FloatFacts",
    "Keep",
    "Limits",
    "Measurement",
    "Row",
    "SearchResult",
    "Stage",
    "Target",
    "Trial",
    "Wanted",
    "auto_quantize",
    "pareto_front",
    "ranked",
    "search",
]
