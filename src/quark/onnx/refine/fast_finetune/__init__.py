"""Fast finetuning: what a layer is fitted to, and where it is found in the two networks.

    trained_layers.py   which layers are trained, and how each is rounded; activations.py   what outputs go through
    rows.py             a layer as rows times weights;                     gathering.py     rows of samples
    walk.py             a network computed piece by piece;                 stages.py        where it stops to remember
    blocks.py           layers that are fitted together;                   torch_graph.py   such a block in torch
    checkpoint.py       finished layers on disk;                           devices.py       who computes

The numbers are fitted in `quark.reconstruction`; `quantization/finetuning.py` puts both together.
"""
