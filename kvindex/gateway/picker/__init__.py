"""An endpoint picker: a proxy's ext_proc stream asks it where each request goes. Extra `epp`.

Read first: `stream.py` (one request's stream, without gRPC), then `service.py`.
"""
