"""Bias correction: biases make up for the mean error that rounding makes in their layer."""
