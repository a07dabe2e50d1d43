"""Finetuning: fit the weights of quantized layers to what the float network computes there.

options           which layers are fitted, how, on what samples, and where
problem           rows of inputs, the outputs wanted for them, and the weights to start from
quantizers        how weights, biases and activations are rounded, as torch functions
learned_weights   AdaRound (arXiv 2004.10568) and AdaQuant (arXiv 2006.10518): what is learned of a weight
objectives        the error of a layer and its gradient, from batches of rows or from a Gram matrix
fit, fit_block    the training loops, of a layer and of the layers of a block;  operators   what lies between those
layers            which layers of a graph are trained, and each as rows times weights
walk              two networks computed piece by piece, and the rows gathered on the way
blocks            layers that are fitted together;  block_fitting   such a block in torch, and its fit
checkpoint        finished layers on disk
on_onnx           puts it all together

Everything but `options`, `problem` and `checkpoint` is imported only when something is finetuned, since it needs torch.
"""
