// The radix tree over prefix keys, shared by all ranks.
//
// The Python twin, kvindex/index/reference/blocks.py, is its readable specification: the same blocks are kept,
// for the same owners, at every moment. A block stays while someone holds it or a block after it.
// `check()` asserts what the comments here and in strand.hpp promise.
//
// Complexity: `extend` and `walk` O(blocks), of which `walk` compares one key for each strand;
// `own` and `disown` O(segments of the strand).
// Thread safety: none; the index's lock owns the tree.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "core/head_table.hpp"
#include "core/owner_sets.hpp"
#include "core/prefix_key.hpp"
#include "core/strand.hpp"

namespace kvindex {

// What separates prompts of equal tokens from the first block on.
struct Namespace {
  uint32_t block_size = 0;
  uint32_t lookahead = 0;
  std::string lora;

  bool operator==(const Namespace&) const = default;
  auto operator<=>(const Namespace&) const = default;
};

struct Root {
  Namespace name;
  Key key = 0;
  uint64_t strands = 0;  // strands in this namespace
  uint64_t users = 0;    // strands, and whoever else needs the number; 0: not in use
  // The strands that begin prompts: how many, and the oldest of them.
  uint32_t children = 0;
  StrandId first = kNoStrand;
};

// Consecutive blocks of one strand.
struct Stretch {
  StrandId strand;
  uint32_t offset;
  uint32_t count;
};

class Tree {
 public:
  explicit Tree(const KeyMaker& keys) : keys_(keys), sets_(keys.root("owners")) {}

  // Namespaces ------------------------------------------------------------------------------

  // The number of a namespace, with one more user.
  RootId enter(uint32_t block_size, uint32_t lookahead, std::string_view lora);
  void enter(RootId root) { ++roots_[root].users; }
  void leave(RootId root);
  const Root& root(RootId root) const { return roots_[root]; }
  // The key before the first block of a namespace.
  Key root_key(const Namespace& name) const;

  // The namespaces of one LoRA that are in use.
  const std::vector<RootId>& roots(std::string_view lora) const;
  // All namespaces that are in use, in order.
  const std::map<Namespace, RootId>& names() const { return names_; }

  // Blocks ----------------------------------------------------------------------------------

  // Append to `chain` the blocks with these contents after a parent (kNoBlock: at the start of the
  // namespace), made where they are missing. New blocks have no owner yet: the caller must `own`
  // the last of them, or `prune` it, before anything else. Fewer than `count` blocks come back
  // only if the tree can hold no more strands. `salted` is said of a chain without a parent, and is
  // inherited.
  void extend(BlockRef parent, RootId root, const Digest* contents, size_t count,
              std::vector<Stretch>& chain, bool salted = false);

  // Likewise, given the blocks' keys.
  void extend_keys(BlockRef parent, RootId root, const Key* keys, size_t count,
                   std::vector<Stretch>& chain, bool salted = false);

  // Whether so many chains of up to kStrandBlocks blocks surely fit.
  bool has_room(size_t chains) const { return strands_.size() + chains < kMostStrands - 512; }

  // Make blocks resident in an owner, where they are not yet.
  void own(const Stretch& blocks, OwnerId owner) { change(blocks, owner, true); }

  // Take a block away from an owner that holds it.
  void disown(BlockRef block, OwnerId owner) {
    release({strand_of(block), offset_of(block), 1}, owner);
    trim(strand_of(block));
  }

  // Take blocks away from an owner, where it holds them; the caller must `prune` the last of them
  // afterwards.
  void release(const Stretch& blocks, OwnerId owner) { change(blocks, owner, false); }

  // Drop what `extend` made up to this block and nobody came to own.
  void prune(BlockRef block) { trim(strand_of(block)); }

  // Give back the memory that the longest chain so far needed.
  void drop_scratch() { made_ = std::vector<Key>(); }

  SetId owners(BlockRef block) const;
  // Whether nobody holds any of these blocks.
  bool unowned(const Stretch& blocks) const;
  // How many blocks an owner holds.
  uint64_t held(OwnerId owner) const { return owner < held_.size() ? held_[owner] : 0; }
  bool owned(BlockRef block, OwnerId owner) const { return sets_.contains(owners(block), owner); }
  // The block before a block, or kNoBlock.
  BlockRef before(BlockRef block) const {
    return offset_of(block) != 0 ? block - 1 : strands_[strand_of(block)].parent;
  }
  uint32_t depth(BlockRef block) const { return strands_[strand_of(block)].depth + offset_of(block); }
  RootId root_of(BlockRef block) const { return strands_[strand_of(block)].root; }
  const OwnerSets& sets() const { return sets_; }
  const Strand& strand(StrandId id) const { return strands_[id]; }
  // Whether this is the name, which may be any, of the block with this key.
  bool is_block(BlockRef block, Key key) const {
    if (!strands_.has(strand_of(block))) return false;
    const Strand& strand = strands_[strand_of(block)];
    return offset_of(block) < strand.count && strand.keys[offset_of(block)] == key;
  }
  // More than any strand's number.
  size_t strand_limit() const { return strands_.limit(); }

  // Visit the segments of a prompt from its start to where the tree no longer agrees: `visit(set,
  // start, stop)` says whether to go on. `keys.ready(n)` makes the prompt's first n keys as far as
  // there are so many and returns how many there are; `keys[i]` is one of them.
  template <class Keys, class Visit>
  void walk(RootId root, Keys& keys, Visit&& visit) const;

  size_t block_count() const { return blocks_; }
  size_t segment_count() const { return segments_; }

  // Assert every invariant, and that each owner holds as many blocks as `resident[owner]` says.
  // Throws InvariantError. O(everything).
  void check(const std::vector<uint64_t>& resident) const;

 private:
  StrandId child(BlockRef parent, RootId root, Key key) const;
  StrandId append_strand(BlockRef parent, RootId root, uint32_t depth, Key first, bool salted);
  void append(Strand& strand, const Key* keys, unsigned count);
  void change(const Stretch& blocks, OwnerId owner, bool add);
  bool extend_last(Few<Segment>& segments, const Stretch& blocks, OwnerId owner);
  void trim(StrandId id);
  void drop(StrandId id);
  void link(StrandId id);
  void unlink(StrandId id);
  void check_strand(StrandId id, const Strand& strand, std::vector<uint64_t>& found) const;
  void check_circle(BlockRef parent, RootId root, StrandId first, uint32_t children) const;

  const KeyMaker keys_;
  OwnerSets sets_;
  StrandPool strands_;
  HeadTable heads_;
  std::vector<Root> roots_;
  std::vector<RootId> free_roots_;
  RootId last_root_ = 0;  // the one that `enter` was asked for last
  std::map<Namespace, RootId> names_;
  std::map<std::string, std::vector<RootId>, std::less<>> by_lora_;
  std::vector<uint64_t> held_;  // blocks, by owner
  std::vector<Key> made_;  // keys of the chain that is being extended
  size_t blocks_ = 0;
  size_t segments_ = 0;
};

template <class Keys, class Visit>
void Tree::walk(RootId root, Keys& keys, Visit&& visit) const {
  if (keys.ready(1) == 0) return;
  StrandId id = child(kNoBlock, root, keys[0]);
  for (uint32_t depth = 0; id != kNoStrand;) {
    const Strand& strand = strands_[id];
    const auto most = static_cast<uint32_t>(keys.ready(depth + strand.count) - depth);
    uint32_t equal = most < strand.count ? most : strand.count;
    // A key names everything before it too: if the last one is equal, all are.
    if (keys[depth + equal - 1] != strand.keys[equal - 1]) {
      uint32_t low = 1;  // the first is known to be equal
      for (uint32_t high = equal - 1; low < high;) {
        const uint32_t middle = (low + high) / 2;
        if (keys[depth + middle] == strand.keys[middle]) {
          low = middle + 1;
        } else {
          high = middle;
        }
      }
      equal = low;
    }
    uint32_t start = 0;
    for (const Segment& segment : strand.segments) {
      const uint32_t stop = segment.stop < equal ? segment.stop : equal;
      if (!visit(segment.owners, depth + start, depth + stop)) return;
      start = stop;
      if (start == equal) break;
    }
    depth += equal;
    if (strand.branches.empty() || keys.ready(depth + 1) <= depth) return;
    id = child(block_ref(id, equal - 1), root, keys[depth]);
  }
}

}  // namespace kvindex
