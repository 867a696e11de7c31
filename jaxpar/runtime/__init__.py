"""The loop around a Program, and what else runs one.

Read ``loop.py`` first. Around it: ``opening.py`` (data, and what a run says of itself), ``run_folder.py``,
``checkpoints.py``, ``pretrained.py`` (starting from another run's parameters), ``metrics.py``, ``profile.py``,
``trackers.py``, and ``hosts.py`` over ``link.py`` and ``tunnel.py`` (several processes). Beside it: ``generate.py``
(texts from a run), ``parity.py`` and ``bench_train.py``.

Nothing here decides how a model is sharded or what is learnt.
"""
