"""`quark.testing`, where AMD Quark had the decorators of tests before they moved to `quark.common`."""

import sys

from quark.common.utils import testing_utils as common_utils
from quark.common.utils.testing_utils import TestCase, skip_if_no_gpu, slow_test, slow_test_if

sys.modules[f"{__name__}.common_utils"] = common_utils

__all__ = ["TestCase", "skip_if_no_gpu", "slow_test", "slow_test_if"]
