"""Count the instructions that torch executes on an emulated CPU of the target (``./inv bench --name=cpu``).

``workloads.py`` runs in the target's Python and marks the regions to count. The plugin ``count.c`` counts how often
each block of code is executed in a region. ``emulation.py`` runs the workloads with the plugin, and
``counts.py`` reads the counts. ``model.py`` estimates the cycles of the blocks with the most executed instructions.
``compare.py`` runs the benchmark for one wheel, or for two wheels to compare them.
"""
