"""Which configuration of a network is small, accurate and fast enough: tried from cheap to dear.

search          a model and data in, a ranked table of trials out; goes on where it was interrupted
Wanted, Budget  what is searched for, and among what
Trial           one configuration, and its size, drop and latency
pareto_front    the trials that none beats;  ranked   all, the best first
"""

from quark.search.budget import Budget, Limits
from quark.search.journal import Keep
from quark.search.ranking import pareto_front, ranked
from quark.search.searching import FloatFacts, SearchResult, Wanted, search
from quark.search.trial import Measurement, Stage, Trial

__all__ = [
    "Budget",
    "FloatFacts",
    "Keep",
    "Limits",
    "Measurement",
    "SearchResult",
    "Stage",
    "Trial",
    "Wanted",
    "pareto_front",
    "ranked",
    "search",
]
