"""`quark.shares`, the former name of `quark.common` in AMD Quark: the same modules under both names."""

import sys

from quark.common import utils
from quark.common.utils import import_utils, log, testing_utils

# entered before Python looks for files, so that `import quark.shares.utils.log` gives the module and not a copy
sys.modules |= {
    f"{__name__}.utils": utils,
    f"{__name__}.utils.import_utils": import_utils,
    f"{__name__}.utils.log": log,
    f"{__name__}.utils.testing_utils": testing_utils,
}
