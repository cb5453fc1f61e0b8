"""Plain-JAX references that define the kernels. Arrays in, arrays out; no model, no tree."""
