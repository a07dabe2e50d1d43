"""Quality of a quantized network in terms of its task: built-in measures, and the user's own function.

    Measure         what to measure; `Measure.of` takes a name, FILE.py:FUNCTION, or a Python function
    measure_names   the built-in measures by name, with one line each
    MeasureResult   the values of the float and the quantized network, and the drop between them
    Judge           evaluates the float network once, and then any number of quantized ones

Built-in measures compare the outputs of two networks on the same samples, and need no labels:

>>> import numpy as np
>>> float_outputs = [{"y": np.array([[1.0, 0.0]])}, {"y": np.array([[0.0, 1.0]])}]
>>> quantized_outputs = [{"y": np.array([[1.0, 0.0]])}, {"y": np.array([[1.0, 1.5]])}]
>>> Measure.of("top1").compare(float_outputs, quantized_outputs)
1.0
>>> round(Measure.of("cosine").compare(float_outputs, quantized_outputs), 3)
0.916

A function gets an ONNX Runtime session and returns a number:

>>> def accuracy(session):
...     return 0.75
>>> Measure.of(accuracy).name
'accuracy'

docs/measures.md describes all of them.
"""

from quark.compare.outputs import samples_of_batch
from quark.measures.measure import (
    FunctionMeasure,
    Judge,
    Measure,
    MeasureResult,
    OutputMeasure,
    Session,
    load_function,
    measure_names,
)

__all__ = [
    "FunctionMeasure",
    "Judge",
    "Measure",
    "MeasureResult",
    "OutputMeasure",
    "Session",
    "load_function",
    "measure_names",
    "samples_of_batch",
]
