"""Look at model files, all through `quark.onnx.plan_reader`, the one reader of quantized files.

inspection    what a file holds
lint          whether AMD's NPU would take it
diagnose      where it differs from the float network
"""
