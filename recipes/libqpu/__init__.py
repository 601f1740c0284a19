"""libqpu: our own C++ library for the QPUs. ``build.py`` makes it for the target."""
