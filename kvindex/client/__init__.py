"""An index that follows engines: `Client` joins a subscriber to an index.

`answering.py` adds to each answer how far it can be trusted; `saved_state.py` has the state from
which a warm restart continues.
Read first: `client.py`; its end has how a subscriber fills an index.
May import: `kvindex.wire`, `kvindex.subscribe` and `kvindex.index`.
"""

from kvindex.client.client import Client, ClientOptions, connect

__all__ = ["Client", "ClientOptions", "connect"]
