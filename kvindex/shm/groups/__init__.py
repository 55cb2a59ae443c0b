"""Process groups, through which ranks agree before they share a queue.

`ProcessGroup` is the protocol that any group can fulfil; `TorchProcessGroup` adapts a group of
`torch.distributed`.
"""
