"""SmoothQuant: outliers of activations move into the weights that read them; exact in float.

smoothing           statistics, the scales that they call for, and what these gain
groups              layers that must have the same scales, and what is done with them
folding             where the division of a tensor can be hidden in constants
on_onnx, on_torch   gathering the statistics, and writing the scales
"""
