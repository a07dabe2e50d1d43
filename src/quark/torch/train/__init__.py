"""The modules that a quantized network is made of."""
