"""TVM's FFI, cross-compiled from its source archive for boards that have no wheel in the package index."""
