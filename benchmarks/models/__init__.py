"""Count the instructions of models that TVM has compiled, and of the same models in eager PyTorch.

``./inv bench --name=models`` runs this benchmark for the target's CPU.

``networks.py`` defines the models. ``on_target.py``, which the target's Python runs, calls the models and marks
regions. The plugin of the benchmark ``cpu`` counts the instructions in these regions. ``compare.py`` runs the benchmark
and compares the counts.
"""
