"""The wheel of CUDA operators: add2, exp, axpy, softmax, matvec, for torch 2.10 and later.

``build.py`` builds it in a container and ``audit.py`` checks it; ``timing.py`` runs its timing tool. ``setup.py``
builds it anywhere.
"""
