// Blocks in the order in which they came. Adding, finding and removing one costs the same however
// many there are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/label_table.hpp"

namespace kvindex {

class BlockSet {
 public:
  explicit BlockSet(const Scramble& scramble) : places_(scramble) {}

  size_t size() const { return places_.size(); }
  bool contains(BlockRef block) const { return places_.find(block) != kNoBlock; }
  BlockRef newest() const { return order_.back(); }

  // Add a block as the newest, unless it is there.
  void add(BlockRef block) {
    const auto place = static_cast<uint32_t>(order_.size());
    if (places_.add(block, place) == kNoBlock) order_.push_back(block);
  }

  // Remove a block, if it is there.
  void erase(BlockRef block) {
    const uint32_t place = places_.find(block);
    if (place == kNoBlock) return;
    order_[place] = kNoBlock;
    places_.erase(block);
    while (!order_.empty() && order_.back() == kNoBlock) order_.pop_back();
    if (order_.size() > 2 * places_.size() + 8) close_gaps();
  }

  // The oldest first.
  template <class Visit>
  void for_each(Visit&& visit) const {
    for (const BlockRef block : order_) {
      if (block != kNoBlock) visit(block);
    }
  }

 private:
  void close_gaps() {
    uint32_t kept = 0;
    for (const BlockRef block : order_) {
      if (block == kNoBlock) continue;
      places_.replace(block, kept);
      order_[kept++] = block;
    }
    order_.resize(kept);
  }

  std::vector<BlockRef> order_;  // kNoBlock where one was removed, but not at the end
  LabelTable places_;            // by block, where it is in `order_`
};

}  // namespace kvindex
