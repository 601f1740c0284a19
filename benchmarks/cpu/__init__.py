"""Instructions that torch executes on the target's CPU, counted in the emulator (``./inv bench --name=cpu``).

``workloads.py`` runs on the target's Python and marks regions. ``count.c`` counts the code blocks that are executed in
the regions. ``emulation.py`` runs both, and ``counts.py`` reads the counts. ``model.py`` estimates the cycles of the
blocks with the most executed instructions. ``compare.py`` is the benchmark.
"""
