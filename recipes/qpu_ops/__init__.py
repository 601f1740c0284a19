"""The extension wheel: PyTorch's device qpu, and operations on the QPUs for CPU tensors.

``target.py`` builds it for the target; ``setup.py`` builds it on any machine, including in the armv7 container.
"""
