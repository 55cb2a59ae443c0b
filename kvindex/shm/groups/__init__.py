"""Process groups: what ranks agree by before they share a queue.

`ProcessGroup` says what is needed; `TcpProcessGroup` needs nothing but a network, and
`TorchProcessGroup` adapts a group of `torch.distributed`.
"""
