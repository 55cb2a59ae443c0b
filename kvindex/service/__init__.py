"""kvindex over HTTP, for routers in other languages and operators. Needs the extra `server`.

`kvindex serve` starts it; docs/service.md says how to use it. `queries/` reads and writes the JSON
of a query, `metrics/` has the Prometheus series, `apis/` the APIs of other projects, `http/` the
HTTP server itself.
Read first: `service.py` (the answers, without HTTP), then `app.py` and `server.py`.
May import: all but `kvindex.testing` and `kvindex.tools`.
"""
