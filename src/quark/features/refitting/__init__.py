"""Refitting: weights and biases are fitted again, layer by layer, to what the quantized network hands them."""
