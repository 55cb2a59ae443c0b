"""kvindex over HTTP, for routers in other languages and operators. Needs the extra `server`.

`kvindex serve` starts it; docs/service.md says how to use it. `queries.py` reads and writes the
JSON of a query, `dialects.py` has the requests in the words of other projects, `metrics.py` the
Prometheus series, `http/` the HTTP server itself.
Read first: `service.py` (the answers, without HTTP), then `app.py` and `server.py`.
May import: all but `kvindex.testing` and `kvindex.tools`.
"""
