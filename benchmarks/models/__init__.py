"""Models compiled by TVM and in eager PyTorch: instructions on the target's CPU (``./inv bench --name=models``).

``networks.py`` defines the models. ``on_target.py`` runs them on the target's Python and marks regions, which the
plugin of the benchmark ``cpu`` counts. ``compare.py`` is the benchmark.
"""
