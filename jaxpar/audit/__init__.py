"""What a compiled step costs, read from its HLO text: no devices, no JAX.

``hlo`` reads the text into computations and ``executions`` says how often each runs (``loops``: trip counts); ``flops``
counts products, ``kernels`` knows hand-written kernels, ``collectives`` counts the bytes each mesh axis carries
(``groups``: which axes those are), ``cycles`` sums the TPU compiler's own estimate of time. Read ``hlo`` first.
"""
