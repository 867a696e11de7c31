"""The loop around a Program: run folders, checkpoints, metrics, signals.

Read ``loop.py`` first. Nothing here decides how a model is sharded or what is learnt.
"""
