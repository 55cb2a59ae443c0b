"""The HTTP dialects of the family, one module each: bodies in, bodies out."""
