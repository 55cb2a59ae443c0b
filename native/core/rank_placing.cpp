// Puts blocks whose place is known into the tree, with their labels and owners, then the blocks that
// waited for these.
#include "core/rank_blocks.hpp"

#include <algorithm>
#include <utility>

namespace kvindex {

// Note a further place of blocks that an event names without their tokens.
void RankBlocks::relocate(const Label* labels, size_t number, OwnerId owner, Hold& hold) {
  for (size_t i = 0; i < number; ++i) {
    const BlockRef block = labels_.newest(labels[i]);
    if (block == kNoBlock) {
      orphans_.hold_label(labels[i], owner);
      count(Counter::unplaced, 1);
    } else if (add_copies(labels[i], block, {{owner, 1}})) {
      count(Counter::stored, 1);
    }
    hold.did(1);
  }
}

// Put a chain of blocks into the tree, cut by cut, and after each all held blocks that waited for
// it. The last block of a cut stays while others go first: this rank holds it. Return the last of
// all, or kNoBlock if there was no room for all.
BlockRef RankBlocks::place(BlockRef parent, Chain chain, Hold& hold) {
  const bool is_short = chain.count * chain.scale <= Hold::kBlocks;
  const size_t most = is_short ? chain.count : std::max<size_t>(1, Hold::kBlocks / chain.scale);
  while (chain.count != 0) {
    const Chain cut = chain.first(most);
    labels_.make_room(cut.labels[0], cut.count, hold);
    const size_t added = place_some(parent, cut, hold);
    if (added < cut.count) {
      ignore(no_room(), chain.count - added);
      return kNoBlock;
    }
    hold.did(cut.count * cut.scale);
    chain = chain.after(cut.count);
  }
  return parent;
}

// Place as many blocks as there is room for; say how many, and move `last` to the last of all.
size_t RankBlocks::place_some(BlockRef& last, const Chain& chain, Hold& hold) {
  std::vector<Stretch>& stretches = shared_.scratch.chain;
  stretches.clear();
  shared_.tree.extend(last, chain.root, chain.contents, chain.count * chain.scale, stretches,
                      chain.salted);
  if (chain.scale != 1) return place_scaled(last, chain, hold);
  const size_t added = add_labels(chain);
  own_chain(added, chain.owner);
  if (!stretches.empty()) {
    const Stretch& end = stretches.back();
    last = block_ref(end.strand, end.offset + end.count - 1);
    if (added < chain.count) shared_.tree.prune(last);
  }
  count(Counter::stored, added);
  if (orphans_.size() == 0) return added;
  std::vector<std::pair<Label, BlockRef>> placed;
  for (const Stretch& stretch : stretches) {
    for (uint32_t i = 0; i < stretch.count && placed.size() < added; ++i) {
      placed.emplace_back(chain.labels[placed.size()],
                          block_ref(stretch.strand, stretch.offset + i));
    }
  }
  attach(std::move(placed), hold);
  return added;
}

// The same for blocks of several units: each is the last one of its own.
size_t RankBlocks::place_scaled(BlockRef& last, const Chain& chain, Hold& hold) {
  std::vector<BlockRef> units;
  for (const Stretch& stretch : shared_.scratch.chain) {
    const BlockRef first = block_ref(stretch.strand, stretch.offset);
    for (uint32_t i = 0; i < stretch.count; ++i) units.push_back(first + i);
  }
  std::vector<std::pair<Label, BlockRef>> placed;
  for (size_t i = 0; i < chain.count; ++i) {
    const size_t end = (i + 1) * chain.scale - 1;
    if (end >= units.size() || !add_copy(chain.labels[i], units[end], chain.owner)) break;
    placed.emplace_back(chain.labels[i], units[end]);
  }
  const size_t added = placed.size();
  count(Counter::stored, added);
  if (!units.empty()) {
    last = units.back();
    if (added < chain.count) shared_.tree.prune(last);
  }
  if (orphans_.size() != 0) attach(std::move(placed), hold);
  return added;
}

// Label the blocks of the extended chain; say how many of them the budget had room for.
size_t RankBlocks::add_labels(const Chain& chain) {
  size_t added = 0;
  for (const Stretch& stretch : shared_.scratch.chain) {
    if (shared_.tree.unowned(stretch)) {  // new ones, as nearly all are
      const size_t some = labels_.add_new(chain.labels + added, stretch, chain.owner);
      added += some;
      if (some < stretch.count) return added;
      continue;
    }
    for (uint32_t i = 0; i < stretch.count; ++i) {
      const BlockRef block = block_ref(stretch.strand, stretch.offset + i);
      if (!labels_.add(chain.labels[added], block, chain.owner)) return added;
      ++added;
    }
  }
  return added;
}

// Make the first blocks of the extended chain resident.
void RankBlocks::own_chain(size_t blocks, OwnerId owner) {
  for (Stretch stretch : shared_.scratch.chain) {
    stretch.count = static_cast<uint32_t>(std::min<size_t>(stretch.count, blocks));
    if (stretch.count == 0) return;
    shared_.tree.own(stretch, owner);
    blocks -= stretch.count;
  }
}

// Give held blocks the place that has become known, and so on down the chain.
void RankBlocks::attach(std::vector<std::pair<Label, BlockRef>> placed, Hold& hold) {
  while (!placed.empty()) {
    const auto [label, block] = placed.back();
    placed.pop_back();
    if (const auto held = orphans_.pop(label)) {
      add_copies(label, block, held->copies);
      if (held->parent) shared_.tree.leave(held->root);
    }
    for (const auto& [child_label, orphan] : orphans_.pop_children(label)) {
      const BlockRef child = attach_one(child_label, orphan, block);
      if (child != kNoBlock) placed.emplace_back(child_label, child);
      shared_.tree.leave(orphan.root);
      shared_.names.release(child_label);
    }
    hold.did(1);
  }
}

BlockRef RankBlocks::attach_one(const Label& label, const Orphan& orphan, BlockRef parent) {
  if (orphan.root != shared_.tree.root_of(parent)) {
    ignore(Ignored::parent_namespace, 1);
    return kNoBlock;
  }
  std::vector<Stretch> chain;
  shared_.tree.extend(parent, orphan.root, &orphan.content, 1, chain);
  if (chain.empty()) {
    ignore(Ignored::max_blocks, 1);
    return kNoBlock;
  }
  const BlockRef block = block_ref(chain[0].strand, chain[0].offset);
  if (!add_copies(label, block, orphan.copies)) {
    shared_.tree.prune(block);
    return kNoBlock;
  }
  count(Counter::orphans_attached, 1);
  return block;
}

// Make a block resident in these places as far as there is room; say if it is in any.
bool RankBlocks::add_copies(const Label& label, BlockRef block, const std::vector<Copies>& copies) {
  size_t added = 0;
  for (const Copies& some : copies) {
    if (add_copy(label, block, some.owner, some.count)) {
      ++added;
    } else {
      ignore(no_room(), 1);
    }
  }
  return added != 0;
}

bool RankBlocks::add_copy(const Label& label, BlockRef block, OwnerId owner, uint64_t copies) {
  if (!labels_.add(label, block, owner, copies)) return false;
  shared_.tree.own({strand_of(block), offset_of(block), 1}, owner);
  return true;
}

}  // namespace kvindex
