"""How a model runs on a mesh: the code inside ``shard_map``.

Read ``layout.py`` first: it is the mesh form of ``models.Layout``, and every collective of a decoder's forward pass is
written there. ``collectives.py`` has the weight gathers whose backward is ZeRO's reduce-scatter, ``cross_entropy.py``
the vocabulary-parallel loss, ``attention.py`` the choice of kernel by platform, ``gradients.py`` the microbatch scan
and the reductions of each ZeRO stage, ``decode.py`` the layout of generation.

The convention that keeps gradients right: inside the map nothing that is differentiated is replicated; parameters,
batch and activations are marked as differing over every mesh axis with more than one device. A device differentiates
its own share of the loss, and the shares add up to the loss, so a gradient is per device until ``gradients.py`` reduces
it, and no ``psum`` is ever transposed (its transpose inside the map depends on ``check_vma``). JAX checks the marks
wherever attention is the chunked kernel, which is every run on a CPU.
"""
