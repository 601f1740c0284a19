"""The CUDA operator wheel: add2, exp, axpy, softmax and matvec, for torch 2.10 and later.

``build.py`` builds the wheel in a container, and ``audit.py`` audits it. ``setup.py`` builds it on any
machine that has the CUDA toolkit and torch's headers. The wheel contains the timing tool ``timing.py``.
"""
