"""kvindex over HTTP: what routers in other languages and operators ask. Needs the extra `server`.

`kvindex serve` starts it; docs/service.md says how to use it.
"""
