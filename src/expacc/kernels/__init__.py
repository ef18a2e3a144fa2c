"""Fast equals of the definition in :mod:`expacc.integrals.quadrature`, and the dispatcher between them."""
