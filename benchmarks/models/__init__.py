"""Count the instructions that models execute, once as compiled by TVM and once in eager PyTorch.

``./inv bench --name=models`` runs this benchmark for the target's CPU.

``networks.py`` defines the models. The target's Python runs ``on_target.py``, which calls the models and marks the
calls whose instructions are counted. The plugin of the benchmark ``cpu`` counts these instructions. ``compare.py`` runs
the benchmark and compares the counts.
"""
