"""Operations with a reference in XLA and, where one is faster, another backend.

Tensor names end in their shape; the letters are explained in `maxmeg/layers/__init__.py`.
"""
