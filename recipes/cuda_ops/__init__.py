"""The CUDA operator wheel: add2, exp, axpy, softmax and matvec, for torch 2.10 and later.

``build.py`` builds it in a container and ``audit.py`` checks it; ``timing.py`` runs its timing tool. ``setup.py``
builds it anywhere.
"""
