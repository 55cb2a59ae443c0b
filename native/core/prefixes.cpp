#include "core/prefixes.hpp"

#include <algorithm>
#include <bit>

#include "core/hold.hpp"

namespace kvindex {

PrefixWalk::PrefixWalk(uint64_t max_nodes, uint64_t min_blocks, const RankRows& rows,
                       bool only_rows)
    : max_nodes_(max_nodes),
      min_blocks_(min_blocks),
      rows_(rows),
      only_rows_(only_rows),
      looks_left_(max_nodes * kLooks) {}

bool PrefixWalk::go_on(const Shared& shared, const std::vector<RankSlot>& ranks) {
  tree_ = &shared.tree;
  owners_ = &shared.owners;
  ranks_ = &ranks;
  holding_of_.clear();  // numbers of sets are used again
  visits_ = 0;
  while (visits_ < Hold::kBlocks) {
    if (children_.left != 0) {
      look();
    } else if (all_namespaces_ || !open_namespace()) {
      if (found_.nodes.size() == max_nodes_ || waiting_.empty()) {
        found_.unique_blocks = tree_->block_count();
        return false;
      }
      const Candidate shown = waiting_.top();
      waiting_.pop();
      show(shown);
    }
  }
  return true;
}

PrefixWalk::Known PrefixWalk::known(BlockRef block) const {
  return {block, tree_->strand(strand_of(block)).keys[offset_of(block)]};
}

// Who holds what, of a set of owners: groups are not told apart.
uint32_t PrefixWalk::holding(SetId set) {
  const auto [place, is_new] = holding_of_.try_emplace(set, 0);
  if (!is_new) return place->second;
  PrefixHolding made;
  std::vector<uint8_t> any((rows_.size() + 7) / 8);
  tree_->sets().for_each(set, [&](OwnerId id) {
    const Owner& owner = (*owners_)[id];
    const uint32_t row = rows_.row_of((*ranks_)[owner.rank].id);
    if (row == RankRows::kNone) return;
    auto at = std::find_if(made.rows.begin(), made.rows.end(),
                           [&](const auto& of) { return *of.first >= *owner.medium; });
    if (at == made.rows.end() || at->first != owner.medium) {
      at = made.rows.insert(at, {owner.medium, std::vector<uint8_t>(any.size())});
    }
    const auto bit = static_cast<uint8_t>(1u << row % 8);
    at->second[row / 8] |= bit;
    any[row / 8] |= bit;
  });
  for (const uint8_t byte : any) made.ranks += static_cast<uint32_t>(std::popcount(byte));
  return place->second = intern(std::move(made));
}

uint32_t PrefixWalk::intern(PrefixHolding&& made) {
  std::string content;
  for (const auto& [medium, rows] : made.rows) {
    content.append(reinterpret_cast<const char*>(&medium), sizeof medium);
    content.append(rows.begin(), rows.end());
  }
  const auto [place, is_new] =
      interned_.try_emplace(std::move(content), static_cast<uint32_t>(found_.holdings.size()));
  if (is_new) found_.holdings.push_back(std::move(made));
  return place->second;
}

PrefixWalk::Chain PrefixWalk::follow(BlockRef first) {
  Chain chain;
  chain.holding = holding(tree_->owners(first));
  StrandId id = strand_of(first);
  uint32_t start = offset_of(first);
  for (;;) {
    ++visits_;
    const Strand& strand = tree_->strand(id);
    const Branch* const branch = std::find_if(strand.branches.begin(), strand.branches.end(),
                                              [&](const Branch& one) { return one.offset >= start; });
    const bool branches = branch != strand.branches.end();
    const uint32_t part = branches ? branch->offset + 1u : strand.count;
    uint32_t stop = start;
    for (const Segment& segment : strand.segments) {
      if (segment.stop <= start) continue;
      if (holding(segment.owners) != chain.holding) break;
      stop = std::min(segment.stop, part);
      if (stop == part) break;
    }
    stop = std::min(stop, start + kMostBlocks - chain.blocks);
    if (stop == start) return chain;  // others hold the strand
    chain.blocks += stop - start;
    chain.end = block_ref(id, stop - 1);
    const bool in_strand = stop < strand.count;
    chain.goes_on = in_strand || branches;
    if (in_strand || !branches || branch->children != 1) return chain;
    id = branch->first;
    start = 0;
  }
}

// Begin to look at the prompts of the next namespace, if there is one.
bool PrefixWalk::open_namespace() {
  const auto& names = tree_->names();
  auto next = last_namespace_ ? names.upper_bound(*last_namespace_) : names.begin();
  while (next != names.end() && tree_->root(next->second).children == 0) {
    ++visits_;
    ++next;
  }
  if (next == names.end()) {
    all_namespaces_ = true;
    return false;
  }
  ++visits_;
  last_namespace_ = next->first;
  const Root& root = tree_->root(next->second);
  const auto number = static_cast<uint32_t>(found_.namespaces.size());
  found_.namespaces.push_back(next->first);
  open({{}, next->second, known(block_ref(root.first, 0)), 0, -1, 0, number}, root.children);
  return true;
}

void PrefixWalk::show(const Candidate& shown) {
  const auto row = static_cast<int64_t>(found_.nodes.size());
  PrefixNode& parent = node(shown.parent);
  --parent.left_out;
  parent.left_out_blocks -= shown.blocks;
  found_.nodes.push_back({shown.parent, shown.depth, shown.blocks, shown.name_space, shown.holding,
                          shown.salted, 0, 0, 0});
  ++visits_;
  const auto [end, key] = shown.end;
  if (!tree_->is_block(end, key)) return;  // it has gone since
  const Strand& strand = tree_->strand(strand_of(end));
  const Branch* const branch = std::find_if(
      strand.branches.begin(), strand.branches.end(),
      [&](const Branch& one) { return one.offset == offset_of(end); });
  const bool in_strand = offset_of(end) + 1 < strand.count;  // the oldest of what follows
  uint64_t count = in_strand ? 1 : 0;
  BlockRef next = end + 1;
  if (branch != strand.branches.end()) {
    count += branch->children;
    if (!in_strand) next = block_ref(branch->first, 0);
  }
  if (count == 0) return;
  open({shown.end, strand.root, known(next), 0, row, shown.depth + shown.blocks, shown.name_space},
       count);
}

// Begin to look at children, but at most at a quarter of those that may still be looked at.
void PrefixWalk::open(Children children, uint64_t count) {
  PrefixNode& parent = node(children.parent);
  parent.children += count;
  parent.left_out += count;
  children.left = std::min(count, looks_left_ / 4);
  looks_left_ -= children.left;
  children_ = children;
}

// Look at the next child. If it has gone meanwhile, nobody knows which one was to come after it.
void PrefixWalk::look() {
  const auto [first, key] = children_.next;
  const BlockRef end = children_.end.block;
  if (!tree_->is_block(first, key) || tree_->before(first) != end ||
      tree_->root_of(first) != children_.root) {
    ++visits_;
    children_.left = 0;
    return;
  }
  const Chain chain = follow(first);
  const Strand& strand = tree_->strand(strand_of(first));
  ++found_.looked_at;
  PrefixNode& parent = node(children_.parent);
  const uint32_t ranks = found_.holdings[chain.holding].ranks;
  if (only_rows_ && ranks == 0) {  // others' alone: it is not left out, but none
    --parent.children;
    --parent.left_out;
  } else {
    parent.left_out_blocks += chain.blocks;
    if (chain.goes_on || chain.blocks >= min_blocks_) {
      waiting_.push({ranks, chain.blocks, found_.looked_at, known(chain.end), children_.parent,
                     children_.depth, children_.name_space, chain.holding, strand.salted});
    }
  }
  if (--children_.left == 0) return;
  StrandId next = strand.newer;
  if (end != kNoBlock && strand_of(first) == strand_of(end)) {
    const Few<Branch>& branches = strand.branches;
    const Branch* const branch =
        std::find_if(branches.begin(), branches.end(),
                     [&](const Branch& one) { return one.offset == offset_of(end); });
    if (branch == branches.end()) {
      children_.left = 0;
      return;
    }
    next = branch->first;
  }
  children_.next = known(block_ref(next, 0));
}

}  // namespace kvindex
