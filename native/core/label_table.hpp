// One rank's table from an engine's labels to blocks.
//
// Open addressing in groups of eight places. Beside the entries lies one byte for each place: seven
// bits of the label, or that the place is empty. A search compares the eight bytes of a group at
// once and looks at an entry only where they agree, so a label that is not there costs no look at
// the entries, and the bytes of many ranks' tables stay in the cache. (The idea is that of "Swiss
// tables", Kulukundis, CppCon 2017.) An entry is 12 bytes; a table is 68 to 90 % full.
//
// Labels are scrambled first: a secret bijection, so that an engine cannot aim at one place, and
// the label can be told from its scrambled form.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/pages.hpp"
#include "core/wide.hpp"

namespace kvindex {

using BlockRef = uint32_t;
inline constexpr BlockRef kNoBlock = 0xffffffffu;

// The bijection between labels and their scrambled forms.
class Scramble {
 public:
  Scramble(uint64_t flip, uint64_t first, uint64_t second)
      : flip_(flip), first_(first | 1), second_(second | 1),
        first_back_(inverse(first_)), second_back_(inverse(second_)) {}

  uint64_t operator()(uint64_t label) const {
    uint64_t x = (label ^ flip_) * first_;
    x ^= x >> 32;
    x *= second_;
    return x ^ x >> 32;
  }
  uint64_t back(uint64_t x) const {
    x ^= x >> 32;
    x *= second_back_;
    x ^= x >> 32;
    return x * first_back_ ^ flip_;
  }

 private:
  // Newton's iteration modulo 2**64; five steps from three right bits.
  static uint64_t inverse(uint64_t odd) {
    uint64_t x = odd;
    for (int i = 0; i < 5; ++i) x *= 2 - odd * x;
    return x;
  }

  uint64_t flip_, first_, second_, first_back_, second_back_;
};

class LabelTable {
 public:
  explicit LabelTable(const Scramble& scramble) : scramble_(&scramble) {}

  size_t size() const { return size_; }

  // Fetch the memory where a label is, or would be.
  void prefetch(uint64_t label) const {
    if (groups_ == 0) return;
    const size_t group = home((*scramble_)(label));
    __builtin_prefetch(tags(group));
    __builtin_prefetch(entry(group * kGroup), 1);
  }

  // The label's block, or kNoBlock.
  BlockRef find(uint64_t label) const;

  // Add a label, unless it is in the table: then return its block, else kNoBlock.
  BlockRef add(uint64_t label, BlockRef block);

  // Give a label that is in the table another block.
  void replace(uint64_t label, BlockRef block);

  // Remove a label that is in the table.
  void erase(uint64_t label);

  void clear();

  template <class Visit>
  void for_each(Visit&& visit) const {
    for (size_t place = 0; place < groups_ * kGroup; ++place) {
      if (memory_.data()[place] < kEmpty) visit(scramble_->back(mark(place)), block(place));
    }
  }

 private:
  static constexpr size_t kGroup = 8;
  static constexpr size_t kEntry = sizeof(uint64_t) + sizeof(BlockRef);
  static constexpr size_t kNowhere = ~size_t{0};
  // Tags of places that hold nothing; others are below. A deleted one does not end a search.
  static constexpr uint8_t kEmpty = 0x80;
  static constexpr uint8_t kDeleted = 0xfe;

  static uint8_t tag_of(uint64_t mark) { return mark & 0x7f; }
  // Groups are in the order of the marks, so growing goes through both tables from front to back.
  size_t home(uint64_t mark) const {
    return static_cast<size_t>(static_cast<uint128_t>(mark) * groups_ >> 64);
  }
  size_t after(size_t group) const { return group + 1 == groups_ ? 0 : group + 1; }

  uint8_t* tags(size_t group) const { return memory_.data() + group * kGroup; }
  uint8_t* entry(size_t place) const { return memory_.data() + groups_ * kGroup + place * kEntry; }
  uint64_t mark(size_t place) const {
    uint64_t value;
    std::memcpy(&value, entry(place), sizeof value);
    return value;
  }
  BlockRef block(size_t place) const {
    BlockRef value;
    std::memcpy(&value, entry(place) + sizeof(uint64_t), sizeof value);
    return value;
  }
  void put(size_t place, uint64_t mark, BlockRef block) {
    memory_.data()[place] = tag_of(mark);
    std::memcpy(entry(place), &mark, sizeof mark);
    std::memcpy(entry(place) + sizeof mark, &block, sizeof block);
  }

  size_t locate(uint64_t mark) const;
  void rehash();

  const Scramble* scramble_;
  Pages memory_;  // the tags, then the entries
  size_t groups_ = 0;
  size_t size_ = 0;
  size_t used_ = 0;  // places that are not empty, deleted ones included
};

}  // namespace kvindex
