"""The extension wheel: the PyTorch device ``qpu``, and operations that the QPUs perform on CPU tensors.

``target.py`` builds it for the target; ``setup.py`` builds it on any machine, including in the armv7 container.
"""
