"""The loop around a Program: run folders, checkpoints, metrics, signals.

Read ``loop.py`` first; ``hosts.py`` and ``link.py`` are about runs of several processes. Nothing here decides how a
model is sharded or what is learnt.
"""
