"""Where a Program runs: mesh axes, devices, and the rules that lay arrays on them.

Read ``axes.py`` (the six axes and their sizes), then ``rules.py`` (logical axis names -> mesh axes, ZeRO stages), then
``devices.py`` (what machine is there). Nothing here knows a model.
"""
