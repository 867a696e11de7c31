"""What a compiled step costs, without running it. Read ``audit.py`` first: it puts everything together.

From the HLO text alone, without JAX: ``hlo`` reads it into computations and ``executions`` says how often each runs
(``loops``: trip counts); ``flops`` counts products, ``kernels`` knows hand-written kernels, ``collectives`` counts the
bytes each mesh axis carries (``groups``: which axes those are), ``traffic`` the bytes between memory and cores,
``cycles`` sums the TPU compiler's own estimate of time.

With the Program beside it: ``memory`` by class and by name, ``analytic`` FLOPs to hold the count against, ``roofline``.
"""
