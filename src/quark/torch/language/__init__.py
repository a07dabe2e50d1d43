"""Language models: Hugging Face modules, quantized layer by layer.

The graph of a whole language model is neither needed nor affordable, so this road works on modules. Layers are taken
one after the other; what a layer gets as inputs is kept for the float network and for the quantized one, and nothing
else of the other layers has to be in memory.

    architecture    where a model has its layers, embedding and head; which linear layers read the same tensor
    streams         the hidden states before the current layer, in the float network and in the quantized one
    linear          QuantizedLinear, what a linear layer becomes; rounding to nearest
    activations     quantizers of what linear layers read and return;  float8   8-bit floats with a scale
    kv_cache        quantizers of the keys and values that attention keeps
    pipeline        one layer after the other; `LayerWork` is what features see of a layer

    saving          folders of Hugging Face, in published layouts;  loading   back into a float module
    streaming       from a folder to a folder with two layers in memory, and on after a kill
    weight_layouts  weights as tensors of a file;  branches   rotations and low-rank parts;  file_configs   their types
    checkpoint      untrusted folders of safetensors, read tensor by tensor

A feature takes part by a module `on_language.py` in its folder, with some of these functions. All return a sequence of
AlgorithmFacts:

    before_layers(work: ModelWork, options)      change the model, but not what it computes; once, before all layers
    before_rounding(work: LayerWork, options)    change a layer, but not what it computes: move scales into a norm
    round_weights(work: LayerWork, options)      round linear layers, by `LayerWork.set_rounded`; layers that no feature
                                                 has rounded are rounded to nearest
"""
