"""Fit the weights of a quantized layer to what the float network computes there. Numbers only, no graph; torch trains.

    problem.py        rows of inputs, what they should give, and where the weights stand
    quantizers.py     how weights and biases are rounded, by the choices of a plan
    adaround.py       learn for each weight which of its two neighbours it takes (arXiv 2004.10568)
    adaquant.py       learn the weights themselves, straight through the rounding (arXiv 2006.10518)
    fit.py            the loop: batches or Gram matrices, the learning rate, early stopping, roll-back

A convolution, a matrix product and the scale of a normalization are one problem: rows times weights in groups.
"""
