"""Measure the CUDA operators on a machine with a GPU.

``on_gpu.py`` runs all measurements, and ``speed.py`` compares the operators' speed with that of other libraries. These
two scripts import nothing else from this repository. ``figures.py`` writes the results to docs/cuda.md.
"""
