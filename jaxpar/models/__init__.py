"""Models: Flax NNX modules that name logical axes only.

Read ``decoder.py`` first. A model never mentions a mesh: the collectives it needs (gathering a layer's weights,
entering and leaving the tensor-parallel part of a layer, attention) are the methods of a ``Layout``
(``layout.py``), whose plain form runs on one device and whose mesh form the Program hands over.

Shape suffixes, here and everywhere:

====  ======================================
B     sequences
S     positions (of queries)
T     positions (of keys)
D     width of the residual stream (embed)
H     query heads
G     key/value heads
R     query heads per key/value head
K     width of a head (head_dim)
F     width of the MLP
V     vocabulary
L     layers
N     tokens, sequences and positions together
A     microbatches of a step
C     a chunk of any of these
====  ======================================
"""
