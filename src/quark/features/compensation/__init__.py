"""Compensation: what rounding one weight does to a layer's output is made up for by the weights that come after it."""
