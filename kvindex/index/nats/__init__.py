"""One relay that writes a pool's events to NATS, and replicas of its index on any machine.

    relay = nats.Relay(workers, "nats://n1,n2", pool="llama")          # on one machine, or two
    replica = nats.join("nats://n1,n2", pool="llama", timeout=30.0)    # on each of the others
    replica.match(token_ids).best

```
engines ─► Client ─ StreamTap ─ LogQueue ─ LogWriter ══ stream ══► Follower ─ Copy ─ Replica
             └────── snapshot ────── object store ── when joining ──►
```

NATS carries, the relay's index is the truth. The log promises nothing: what it loses, forgets or
gets from others is noticed by its numbers, and a snapshot heals it.
"""
