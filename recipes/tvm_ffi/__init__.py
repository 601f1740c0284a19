"""TVM's FFI, cross-compiled from its source archive for boards for which the package index does not have a wheel."""
