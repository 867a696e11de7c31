"""Optimizers: optax gradient transformations, learning-rate schedules, and which parameter goes where.

Read ``optimizers.py``. Numbers that a sweep changes (learning rate, decay, moments' decay rates, schedule lengths) are
*traced*: they enter the compiled step as arguments, so a sweep over them compiles once.
"""
