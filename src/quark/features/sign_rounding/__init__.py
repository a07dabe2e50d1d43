"""Learned rounding: whether a weight is rounded up or down is learned from the outputs of its layer (AutoRound)."""
