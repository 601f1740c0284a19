"""Count the instructions of models that TVM has compiled, and of the same models in eager PyTorch.

``./inv bench --name=models`` runs this benchmark for the target's CPU.

``networks.py`` defines the models. ``on_target.py`` runs the models with the target's Python and marks regions, in
which the plugin of the benchmark ``cpu`` counts instructions. ``compare.py`` runs the benchmark and compares
the counts.
"""
