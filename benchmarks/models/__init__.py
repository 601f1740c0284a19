"""Count the instructions of models on the target's CPU, with TVM and in eager PyTorch (``./inv bench --name=models``).

``networks.py`` defines the models. ``on_target.py`` runs them with the target's Python and marks regions, in which
the plugin of the benchmark ``cpu`` counts instructions. ``compare.py`` is the benchmark.
"""
