"""Operations: a reference in XLA, and other backends for some of them.

Tensor names end in their shape; the letters are explained in `maxmeg/layers/__init__.py`.
"""
