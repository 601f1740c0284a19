"""TVM's FFI, cross-compiled from its source archive for boards for which the package index has no wheel."""
