"""The index alone: apply a rank's events, then ask how much of a prompt it holds. No sockets.

python examples/01_apply_and_match.py
"""

from kvindex import BlockRemoved, BlockStored, EventBatch, Index, Rank

index = Index()
rank = Rank(worker="vllm-0", dp_rank=0)
prompt = list(range(100))

# An engine announces the blocks that enter its cache: its own hashes for them, and their tokens.
stored = BlockStored(block_hashes=[11, 12, 13], token_ids=prompt[:48], block_size=16)
index.apply(rank, EventBatch(ts=0.0, events=[stored]))

# A query needs tokens only. The engine's hashes are labels that other engines need not share.
match = index.match(prompt)
print(f"{rank} holds {match[rank].blocks} blocks, {match[rank].tokens} of {len(prompt)} tokens")

# A hole ends the match: a prefix cache cannot use the resident blocks after it.
index.apply(rank, EventBatch(ts=1.0, events=[BlockRemoved(block_hashes=[12])]))
print(f"after block 12 has left: {index.match(prompt)[rank].tokens} tokens")

# When the block is stored again, the blocks after it count again.
again = BlockStored(block_hashes=[12], parent_block_hash=11, token_ids=prompt[16:32], block_size=16)
index.apply(rank, EventBatch(ts=2.0, events=[again]))
print(f"after it has come back: {index.match(prompt)[rank].tokens} tokens")
