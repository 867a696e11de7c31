"""Where a Program runs: mesh axes, devices, and the rules that lay arrays on them.

Read ``axes.py`` (the six axes, their sizes, how they lie on a torus), then ``rules.py`` (logical axis names -> mesh
axes, ZeRO stages), then ``devices.py`` (what machine is there) and ``targets.py`` (a machine that is only described;
what is known of each chip stands in ``chips.toml``). Nothing here knows a model.
"""
