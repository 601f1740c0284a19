"""TVM's FFI for boards that the package index has no wheel for: from its source archive, cross-compiled."""
