"""The extension wheel: element-wise and matrix-vector operations on the QPUs.

``native.py`` builds and tests it on this machine; ``setup.py`` is what builds it anywhere, in the armv7 container too.
"""
