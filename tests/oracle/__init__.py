"""The slow, plain definition of what the engine emits: numpy in float64, nothing cached, nothing shared with the engine.

Models get their weights as numpy arrays and read sizes off a config object's attributes. Arrays are named after their
axes by the key in ``ddtree_jax/config.py``.

::

    noise     JAX's counter-based random numbers, again         layers    what both models are made of
    sampling  from logits to a token                            target    DeepSeek-V3 with expanded keys and values
    tree      the reference heap                                drafter   DFlash
    loop      a sequence's tokens, where it ends, how many each round accepts
"""
