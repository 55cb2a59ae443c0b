#include "core/tree.hpp"

#include <algorithm>
#include <array>

#include "core/invariant.hpp"

namespace kvindex {

// Namespaces ---------------------------------------------------------------------------------

namespace {

std::string name_bytes(const Namespace& name) {
  return std::to_string(name.block_size) + ":" + std::to_string(name.lookahead) + ":" + name.lora;
}

// Whether a strand begins after this one's last block. Then none may be appended to this one: what
// goes on in a strand is always the oldest of what follows a block.
bool branches_at_end(const Strand& strand) {
  return !strand.branches.empty() && strand.branches.back().offset + 1u == strand.count;
}

constexpr uint32_t kStrandMask = (1u << (32 - kOffsetBits)) - 1;  // that a `Branch` keeps

}  // namespace

RootId Tree::enter(uint32_t block_size, uint32_t lookahead, std::string_view lora) {
  if (last_root_ < roots_.size()) {
    Root& last = roots_[last_root_];
    if (last.users != 0 && last.name.block_size == block_size &&
        last.name.lookahead == lookahead && last.name.lora == lora) {
      ++last.users;
      return last_root_;
    }
  }
  const Namespace name{block_size, lookahead, std::string(lora)};
  const auto known = names_.find(name);
  if (known != names_.end()) {
    ++roots_[known->second].users;
    return last_root_ = known->second;
  }
  RootId id;
  if (free_roots_.empty()) {
    id = static_cast<RootId>(roots_.size());
    roots_.emplace_back();
  } else {
    id = free_roots_.back();
    free_roots_.pop_back();
  }
  roots_[id] = Root{name, root_key(name), 0, 1};
  names_.emplace(name, id);
  by_lora_[name.lora].push_back(id);
  return last_root_ = id;
}

Key Tree::root_key(const Namespace& name) const { return keys_.root(name_bytes(name)); }

void Tree::leave(RootId id) {
  Root& root = roots_[id];
  if (--root.users != 0) return;
  names_.erase(root.name);
  const auto siblings = by_lora_.find(root.name.lora);
  std::erase(siblings->second, id);
  if (siblings->second.empty()) by_lora_.erase(siblings);
  root = Root{};
  free_roots_.push_back(id);
}

const std::vector<RootId>& Tree::roots(std::string_view lora) const {
  static const std::vector<RootId> none;
  const auto found = by_lora_.find(lora);
  return found == by_lora_.end() ? none : found->second;
}

// Extending ----------------------------------------------------------------------------------

StrandId Tree::child(BlockRef parent, RootId root, Key key) const {
  return heads_.find(key, kNoStrand, [&](StrandId id) {
    const Strand& strand = strands_[id];
    __builtin_prefetch(&strand.keys[strand.count - 1u]);  // a walk compares it next
    return strand.parent == parent && strand.keys[0] == key && strand.root == root;
  });
}

void Tree::extend(BlockRef parent, RootId root, const Digest* contents, size_t count,
                  std::vector<Stretch>& chain, bool salted) {
  Key key = parent == kNoBlock ? roots_[root].key : strands_[strand_of(parent)].keys[offset_of(parent)];
  made_.resize(count);
  for (size_t i = 0; i < count; ++i) made_[i] = key = keys_.child(key, contents[i]);
  extend_keys(parent, root, made_.data(), count, chain, salted);
}

void Tree::extend_keys(BlockRef parent, RootId root, const Key* keys, size_t count,
                       std::vector<Stretch>& chain, bool salted) {
  StrandId id = kNoStrand;
  unsigned used = 0;
  uint32_t depth = 0;
  if (parent != kNoBlock) {
    id = strand_of(parent);
    used = offset_of(parent) + 1;
    depth = strands_[id].depth + used;
  }
  size_t done = 0;
  // Blocks that are there: along a strand, then into the strand that begins there.
  while (done < count) {
    if (id != kNoStrand) {
      const Strand& strand = strands_[id];
      const unsigned start = used;
      while (done < count && used < strand.count && strand.keys[used] == keys[done]) {
        ++used;
        ++done;
      }
      if (used != start) chain.push_back({id, start, used - start});
      if (done == count) return;
    }
    const BlockRef last = id == kNoStrand ? kNoBlock : block_ref(id, used - 1);
    const bool branches = id == kNoStrand || !strands_[id].branches.empty();
    const StrandId next = branches ? child(last, root, keys[done]) : kNoStrand;
    if (next == kNoStrand) break;
    id = next;
    used = 0;
  }
  // Blocks that are missing: at the end of the strand, as long as it has room, then in new ones.
  depth += static_cast<uint32_t>(done);
  while (done < count) {
    const BlockRef last = id == kNoStrand ? kNoBlock : block_ref(id, used - 1);
    if (id == kNoStrand || used < strands_[id].count || used == kStrandBlocks ||
        branches_at_end(strands_[id])) {
      const StrandId made = append_strand(last, root, depth, keys[done], salted);
      if (made == kNoStrand) return;
      id = made;
      used = 0;
    }
    Strand& strand = strands_[id];
    const auto room = std::min<size_t>(count - done, kStrandBlocks - used);
    append(strand, keys + done, static_cast<unsigned>(room));
    chain.push_back({id, used, static_cast<uint32_t>(room)});
    used += static_cast<unsigned>(room);
    done += room;
    depth += static_cast<uint32_t>(room);
  }
}

// A new strand without blocks yet, known by the key of the one that it will begin with.
StrandId Tree::append_strand(BlockRef parent, RootId root, uint32_t depth, Key first,
                             bool salted) {
  const StrandId id = strands_.make();
  if (id == kNoStrand) return id;
  Strand& strand = strands_[id];
  strand.parent = parent;
  strand.root = root;
  strand.depth = depth;
  strand.salted = parent == kNoBlock ? salted : strands_[strand_of(parent)].salted;
  heads_.insert(first, id);
  link(id);
  enter(root);
  ++roots_[root].strands;
  return id;
}

void Tree::append(Strand& strand, const Key* keys, unsigned count) {
  strand.reserve(strand.count + count);
  std::copy(keys, keys + count, strand.keys.get() + strand.count);
  strand.count = static_cast<uint8_t>(strand.count + count);
  blocks_ += count;
  if (!strand.segments.empty() && strand.segments.back().owners == kNoOwners) {
    strand.segments.back().stop = strand.count;
  } else {
    strand.segments.push_back({kNoOwners, strand.count});
    ++segments_;
  }
}

// Make a strand the newest of those that begin after the same block.
void Tree::link(StrandId id) {
  Strand& strand = strands_[id];
  strand.older = strand.newer = id;
  const auto close = [&](StrandId first) {
    strand.newer = first;
    strand.older = strands_[first].older;
    strands_[strand.older].newer = id;
    strands_[first].older = id;
  };
  if (strand.parent == kNoBlock) {
    Root& root = roots_[strand.root];
    if (root.children++ == 0) {
      root.first = id;
    } else {
      close(root.first);
    }
    return;
  }
  Few<Branch>& branches = strands_[strand_of(strand.parent)].branches;
  const uint32_t offset = offset_of(strand.parent);
  Branch* at = std::find_if(branches.begin(), branches.end(),
                            [&](const Branch& branch) { return branch.offset >= offset; });
  if (at == branches.end() || at->offset != offset) {
    branches.insert(at, {1, offset & (kStrandBlocks - 1), id & kStrandMask});
  } else {
    ++at->children;
    close(at->first);
  }
}

void Tree::unlink(StrandId id) {
  const Strand& strand = strands_[id];
  strands_[strand.older].newer = strand.newer;
  strands_[strand.newer].older = strand.older;
  if (strand.parent == kNoBlock) {
    Root& root = roots_[strand.root];
    --root.children;
    if (root.first == id) root.first = root.children == 0 ? kNoStrand : strand.newer;
    return;
  }
  Few<Branch>& branches = strands_[strand_of(strand.parent)].branches;
  Branch* at = std::find_if(branches.begin(), branches.end(), [&](const Branch& branch) {
    return branch.offset == offset_of(strand.parent);
  });
  if (--at->children == 0) {
    branches.erase(at);
  } else if (at->first == id) {
    at->first = strand.newer & kStrandMask;
  }
}

// Owners -------------------------------------------------------------------------------------

SetId Tree::owners(BlockRef block) const {
  const unsigned offset = offset_of(block);
  const Segment* segment = strands_[strand_of(block)].segments.begin();
  while (segment->stop <= offset) ++segment;
  return segment->owners;
}

bool Tree::unowned(const Stretch& blocks) const {
  const Segment* segment = strands_[blocks.strand].segments.begin();
  while (segment->stop <= blocks.offset) ++segment;
  return segment->owners == kNoOwners && segment->stop >= blocks.offset + blocks.count;
}

// Draw the segments of a strand anew, with these blocks' owners changed.
void Tree::change(const Stretch& blocks, OwnerId owner, bool add) {
  if (owner >= held_.size()) held_.resize(owner + 1);
  Few<Segment>& segments = strands_[blocks.strand].segments;
  if (add && extend_last(segments, blocks, owner)) return;
  const uint32_t begin = blocks.offset;
  const uint32_t end = blocks.offset + blocks.count;
  std::array<Segment, kStrandBlocks + 2> drawn;
  uint8_t count = 0;
  // Each drawn segment has a reference of its own; equal neighbours become one.
  const auto draw = [&](SetId set, uint32_t stop) {
    if (count != 0 && drawn[count - 1].owners == set) {
      sets_.release(set);
      drawn[count - 1].stop = stop;
    } else {
      drawn[count++] = {set, stop};
    }
  };
  const auto keep = [&](SetId set, uint32_t stop) {
    sets_.acquire(set);
    draw(set, stop);
  };
  uint32_t start = 0;
  for (const Segment& segment : segments) {
    const uint32_t from = std::max(start, begin);
    const uint32_t to = std::min(segment.stop, end);
    if (from >= to || sets_.contains(segment.owners, owner) == add) {
      keep(segment.owners, segment.stop);
    } else {
      if (start < from) keep(segment.owners, from);
      const uint64_t changed = to - from;
      held_[owner] = add ? held_[owner] + changed : held_[owner] - changed;
      draw(add ? sets_.with(segment.owners, owner) : sets_.without(segment.owners, owner), to);
      if (to < segment.stop) keep(segment.owners, segment.stop);
    }
    start = segment.stop;
  }
  for (const Segment& segment : segments) sets_.release(segment.owners);
  segments_ += count;
  segments_ -= segments.size();
  segments.assign(drawn.data(), count);
}

// What engines do all the time: append a block for the one owner of what is before it.
bool Tree::extend_last(Few<Segment>& segments, const Stretch& blocks, OwnerId owner) {
  const uint8_t count = segments.size();
  if (count < 2 || segments.back().owners != kNoOwners) return false;
  Segment& before = segments.begin()[count - 2];
  if (before.stop != blocks.offset || segments.back().stop != blocks.offset + blocks.count) {
    return false;
  }
  if (sets_.size(before.owners) != 1 || !sets_.contains(before.owners, owner)) return false;
  before.stop = segments.back().stop;
  held_[owner] += blocks.count;
  segments.erase(&segments.back());
  --segments_;
  return true;
}

// Drop the blocks at a strand's end that nobody holds and nothing follows, then, if none is left,
// the strand, and so on with the one before it.
void Tree::trim(StrandId id) {
  for (;;) {
    Strand& strand = strands_[id];
    const uint32_t needed = strand.branches.empty() ? 0 : strand.branches.back().offset + 1;
    uint32_t count = strand.count;
    while (count > needed && strand.segments.back().owners == kNoOwners) {
      const uint8_t before = static_cast<uint8_t>(strand.segments.size() - 1);
      const uint32_t start = before == 0 ? 0 : strand.segments.begin()[before - 1].stop;
      count = std::max(start, needed);
      if (count > start) {
        strand.segments.back().stop = count;
        break;
      }
      strand.segments.erase(&strand.segments.back());
      --segments_;
    }
    if (count == strand.count) return;
    blocks_ -= strand.count - count;
    if (count != 0) {
      strand.count = static_cast<uint8_t>(count);
      strand.fit();
      return;
    }
    const BlockRef parent = strand.parent;
    unlink(id);
    drop(id);
    if (parent == kNoBlock) return;
    id = strand_of(parent);
  }
}

// Forget a strand whose blocks are gone; its keys are still there.
void Tree::drop(StrandId id) {
  Strand& strand = strands_[id];
  heads_.erase(strand.keys[0], id);
  --roots_[strand.root].strands;
  leave(strand.root);
  strands_.drop(id);
}

// Checking -----------------------------------------------------------------------------------

void Tree::check(const std::vector<uint64_t>& resident) const {
  size_t strands = 0;
  size_t blocks = 0;
  size_t segments = 0;
  size_t branches = 0;
  std::vector<uint64_t> found(resident.size());
  std::vector<uint64_t> in_root(roots_.size());
  strands_.for_each([&](StrandId id, const Strand& strand) {
    ++strands;
    blocks += strand.count;
    segments += strand.segments.size();
    for (const Branch& branch : strand.branches) branches += branch.children;
    ++in_root[strand.root];
    if (strand.parent == kNoBlock) ++branches;
    check_strand(id, strand, found);
  });
  require(strands == strands_.size() && strands == heads_.size(), "strands are miscounted");
  require(branches == strands, "strands hang from branches that do not know them");
  require(blocks == blocks_, std::to_string(blocks) + " blocks, counted " + std::to_string(blocks_));
  require(segments == segments_, "segments are miscounted");
  for (RootId id = 0; id < roots_.size(); ++id) {
    check_circle(kNoBlock, id, roots_[id].first, roots_[id].children);
    require(in_root[id] == roots_[id].strands, "a namespace's strands are miscounted");
    require(roots_[id].users >= roots_[id].strands, "a namespace has too few users");
  }
  for (size_t owner = 0; owner < resident.size(); ++owner) {
    require(found[owner] == resident[owner],
            "owner " + std::to_string(owner) + " holds " + std::to_string(found[owner]) +
                " blocks of the tree, " + std::to_string(resident[owner]) + " by its labels");
    require(found[owner] == held(static_cast<OwnerId>(owner)), "an owner's blocks are miscounted");
  }
}

void Tree::check_strand(StrandId id, const Strand& strand, std::vector<uint64_t>& found) const {
  require(strand.count <= strand.capacity && strand.capacity <= kStrandBlocks, "a strand too long");
  require(child(strand.parent, strand.root, strand.keys[0]) == id, "a strand that is not found");
  if (strand.parent != kNoBlock) {
    const Strand& parent = strands_[strand_of(strand.parent)];
    require(offset_of(strand.parent) < parent.count, "a strand after a block that is gone");
    require(strand.depth == depth(strand.parent) + 1, "a strand at a wrong depth");
    require(strand.root == parent.root, "a strand in another namespace than its parent");
  } else {
    require(strand.depth == 0, "a prompt's first strand at a wrong depth");
  }
  uint32_t start = 0;
  SetId before = kNoOwners;
  for (const Segment& segment : strand.segments) {
    require(segment.stop > start, "an empty segment");
    require(start == 0 || segment.owners != before, "two segments that could be one");
    sets_.for_each(segment.owners, [&](OwnerId owner) {
      require(owner < found.size(), "an owner that nobody knows");
      found[owner] += segment.stop - start;
    });
    start = segment.stop;
    before = segment.owners;
  }
  require(start == strand.count, "segments that do not cover their strand");
  uint32_t next = 0;
  for (const Branch& branch : strand.branches) {
    require(branch.offset >= next && branch.offset < strand.count, "branches out of order");
    require(branch.children != 0, "a branch without a strand");
    check_circle(block_ref(id, branch.offset), strand.root, branch.first, branch.children);
    next = branch.offset + 1;
  }
  require(before != kNoOwners || next == strand.count, "a last block that nobody needs was kept");
}

void Tree::check_circle(BlockRef parent, RootId root, StrandId first, uint32_t children) const {
  StrandId id = first;
  for (uint32_t i = 0; i < children; ++i, id = strands_[id].newer) {
    const Strand& strand = strands_[id];
    require(strand.count != 0 && strand.parent == parent && strand.root == root,
            "a strand among those that begin elsewhere");
    require(strands_[strand.newer].older == id, "strands in a broken circle");
  }
  require(children == 0 || id == first, "strands in a circle of another length");
}

}  // namespace kvindex
