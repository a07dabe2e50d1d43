"""Which configuration of a network is small, accurate and fast enough: tried from cheap to dear.

auto_quantize   a model and data in, the best quantized model for a target out: `--config auto`
search          a model and data in, a ranked table of trials out; goes on where it was interrupted
Wanted, Budget  what is searched for, and among what
Trial           one configuration, and its size, drop and latency
pareto_front    the trials that none beats;  ranked   all, the best first
"""

from quark.search.auto import AutoResult, Bound, Row, auto_quantize
from quark.search.budget import Budget, Limits
from quark.search.candidates import Target
from quark.search.journal import Keep
from quark.search.ranking import pareto_front, ranked
from quark.search.searching import FloatFacts, SearchResult, Wanted, search
from quark.search.trial import Measurement, Stage, Trial

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
