"""The HTTP dialects of the family, one module each: bodies in, bodies out.

`asking.py` recognizes the dialect of a query, `registering.py` that of a registration.
"""
