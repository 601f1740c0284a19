"""The wheel of CUDA operators: add2, exp, axpy, softmax, matvec, for every torch from 2.10 on.

``build.py`` builds it in a container and ``audit.py`` looks into it; ``native.py`` tests it on this machine, and
``timing.py`` runs its timing tool. ``setup.py`` is what builds it anywhere. ``on_gpu.py`` and ``speed.py`` run on a
machine with a GPU and import nothing of ours.
"""
