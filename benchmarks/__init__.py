"""Benchmarks that check the project's time and memory goals, and measure conventional methods for comparison.

    ./inv bench [--name=build | extension | export | device | kernels | torch | cpu | models | lab]

Each benchmark is a module with a function ``measure`` that takes a ``Workspace`` and returns a ``Result``. The
benchmarks use a separate folder and separate image names, so they leave the user's build unchanged. The report shows
each measured figure, and states whether the figure meets its goal. No test checks the goals, because the figures depend
on the machine.
"""
