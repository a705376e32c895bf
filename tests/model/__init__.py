"""A model paged through kvpager: what it computes must be what it computes with contiguous KV, to the last bit.

``llama.py`` is a small Llama in NumPy, ``contiguous.py`` runs it with KV in one piece, ``device.py`` with KV in blocks,
and ``engine.py`` serves it by a batch of a pager and compares the two after every step: K and V first, which names the
layer and the position that is wrong, then logits, then tokens.
"""
