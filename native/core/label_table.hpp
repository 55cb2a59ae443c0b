// One rank's table from an engine's labels to blocks.
//
// Open addressing in buckets of one cache line, five entries of 12 bytes each: nearly every question
// is answered by one line, which can be fetched ahead. What finds its bucket full goes to the next
// one; each bucket counts what passed it by, so a search ends where nothing did, and removing leaves
// no traces. A table is 63 to 88 % full.
//
// Labels are scrambled first: a secret bijection, so that an engine cannot aim at one bucket, and
// the label follows from its scrambled form.
#pragma once

#include <algorithm>
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
    if (count_ != 0) __builtin_prefetch(&bucket(home((*scramble_)(label))), 1);
  }

  // The label's block, or kNoBlock.
  BlockRef find(uint64_t label) const;

  // Add a label, unless it is in the table: then return its block, else kNoBlock.
  BlockRef add(uint64_t label, BlockRef block);

  // Whether so many further labels make the table grow, and that growth ahead of them.
  bool must_grow(size_t labels) const { return (size_ + labels) * 100 > count_ * kSlots * 88; }
  void grow(size_t labels) { rehash(std::max(size_ * 14 / 10, size_ + labels)); }

  // Make room for so many labels in all, so that the table need not grow up to there.
  void reserve(size_t labels) {
    if (labels * 100 > count_ * kSlots * 88) rehash(labels);
  }

  // Give a label that is in the table another block.
  void replace(uint64_t label, BlockRef block);

  // Remove a label that is in the table.
  void erase(uint64_t label);

  void clear();

  template <class Visit>
  void for_each(Visit&& visit) const {
    for (size_t i = 0; i < count_; ++i) {
      const Bucket& some = bucket(i);
      for (unsigned slot = 0; slot < some.used; ++slot) {
        visit(scramble_->back(some.entries[slot].mark()), some.entries[slot].block);
      }
    }
  }

 private:
  static constexpr unsigned kSlots = 5;

  struct Entry {
    uint32_t low = 0;
    uint32_t high = 0;
    BlockRef block = 0;

    uint64_t mark() const { return low | uint64_t{high} << 32; }
  };
  struct alignas(64) Bucket {
    Entry entries[kSlots];
    uint8_t used;
    uint8_t spare;
    uint16_t passed;  // entries that belong here or before, and are behind
  };
  static_assert(sizeof(Bucket) == 64);

  // Where an entry is; slot kSlots: nowhere.
  struct Place {
    size_t bucket;
    unsigned slot;
  };

  // Buckets are in the order of the marks, so growing goes through both tables from front to back.
  size_t home(uint64_t mark) const {
    return static_cast<size_t>(static_cast<uint128_t>(mark) * count_ >> 64);
  }
  size_t after(size_t bucket) const { return bucket + 1 == count_ ? 0 : bucket + 1; }
  Bucket& bucket(size_t i) const { return reinterpret_cast<Bucket*>(memory_.data())[i]; }
  static unsigned slot_of(const Bucket& bucket, uint64_t mark);
  Place locate(uint64_t mark) const;
  void put(uint64_t mark, BlockRef block);
  void rehash(size_t labels);

  const Scramble* scramble_;
  Pages memory_;
  size_t count_ = 0;  // buckets
  size_t size_ = 0;
};

}  // namespace kvindex
