"""Fit the weights of a quantized layer to what the float network computes there. Numbers only, no graph; torch trains.

    problem.py        rows of inputs, what they should give, and where the weights stand
    quantizers.py     how weights and biases are rounded, by the choices of a plan
    adaround.py       learn for each weight which of its two neighbours it takes (arXiv 2004.10568)
    adaquant.py       learn the weights themselves, straight through the rounding (arXiv 2006.10518)
    objectives.py     the error and its gradient, of batches of rows or by a Gram matrix;  tensors.py  on the device
    learning_rate.py  the one that fits a layer
    fit.py            the loop: early stopping, the best of each output, roll-back

A convolution, a matrix product and the scale of a normalization are one problem: rows times weights in groups.

    fit_block.py      layers of a block together: block_problem.py, block_samples.py, straight_through.py
    operators*.py     what stands between them, as ONNX defines it
"""
