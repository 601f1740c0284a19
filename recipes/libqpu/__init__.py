"""libqpu: this project's C++ library for the QPUs. ``build.py`` builds it for the target."""
