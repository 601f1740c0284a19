"""What this project promises in seconds and megabytes, measured beside the plain way of doing the same.

    ./inv bench [--name=build | extension | export | device | kernels | torch]

Each benchmark is a module with a function ``measure`` that takes a ``Workspace`` and returns a ``Result``. They work in
a folder and under image names of their own; nothing of the user's build is touched. A goal is shown as met or not met
with the figure that was measured, and is never a test: another machine has other figures.
"""
