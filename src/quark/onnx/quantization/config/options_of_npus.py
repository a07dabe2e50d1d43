"""Extra options: what an NPU computes, and its limits."""

from __future__ import annotations

from quark.onnx.quantization.config.option_kinds import BOOL, integer
from quark.onnx.quantization.config.option_treatments import ForNpu, Option, Refused

NPU_OPTIONS: tuple[Option, ...] = (
    *(
        Option(name, BOOL, ForNpu(), doc)
        for name, doc in {
            "SimulateDPU": "operators as an NPU computes them: those of the following that are usual",
            "ConvertLeakyReluToDPUVersion": "LeakyRelu as an NPU computes it",
            "ConvertSigmoidToHardSigmoid": "Sigmoid as HardSigmoid",
            "ConvertHardSigmoidToDPUVersion": "HardSigmoid as an NPU computes it",
            "ConvertAvgPoolToDPUVersion": "AveragePool as an NPU computes it",
            "ConvertReduceMeanToDPUVersion": "ReduceMean as an NPU computes it",
            "ConvertClipToDPUVersion": "Clip as an NPU computes it",
            "NPULimitationCheck": "positions of power-of-two scales are brought within an NPU's limits, by the rules "
            "that follow and those for Concat, pooling, Pad and Slice",
            "AdjustShiftCut": "shifts from sum to output within limits",
            "AdjustShiftBias": "shifts of biases within limits",
            "AdjustShiftRead": "shifts of the inputs of elementwise operators within limits",
            "AdjustShiftWrite": "shifts of the outputs of elementwise operators within limits",
            "AdjustHardSigmoid": "positions around HardSigmoid within limits",
            "AdjustShiftSwish": "positions around Swish within limits",
        }.items()
    ),
    Option(
        "ConvertSoftmaxToDPUVersion",
        BOOL,
        Refused("how an NPU approximates Softmax is not part of this version, which keeps it exact; leave it out"),
        "Softmax as an NPU computes it",
    ),
    Option("MaxLoopNum", integer(0), ForNpu(), "rounds after which rules that contradict each other are given up"),
)
