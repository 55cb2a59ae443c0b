"""Adapters for other routers: each is a module of its own, which needs that router's package."""
