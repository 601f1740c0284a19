"""The measurements of the CUDA operators, on a machine with a GPU.

``on_gpu.py`` runs them all and ``speed.py`` is the comparison; both are scripts that import nothing else from this
repository. ``figures.py`` writes the results to docs/cuda.md.
"""
