"""A gateway: OpenAI's API in front of engines; each request goes to the one that holds its prompt.

`kvindex gateway` starts it. Needs the extra `gateway`.
Read first: `request_life.py` (a request's life, without sockets), then `front.py`.
May import: the public names of all rooms but `kvindex.testing` and `kvindex.tools`.
"""
