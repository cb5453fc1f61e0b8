"""Kernels and the plain-JAX references that define them. Arrays in, arrays out; no model, no tree."""
