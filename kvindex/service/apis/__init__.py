"""The HTTP APIs of other indexers, one module each: bodies in, bodies out.

`query_requests.py` recognizes the API of a query, `registration_requests.py` that of a
registration.
"""
