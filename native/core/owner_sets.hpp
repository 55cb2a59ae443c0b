// Sets of owners, each distinct set stored once.
//
// A segment of the tree names its owners by one number; equal sets have equal numbers, so segments
// are compared and merged without looking inside. A set is a sorted list while that is smaller,
// else a bitmap. Owned by the index, under its lock.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace kvindex {

using OwnerId = uint32_t;
using SetId = uint32_t;

inline constexpr SetId kNoOwners = 0;

class OwnerSets {
 public:
  explicit OwnerSets(uint64_t secret);

  // The set with one owner more or less, as a new reference; the given one is not released.
  // The owner must not be in the set, or be in it.
  SetId with(SetId set, OwnerId owner);
  SetId without(SetId set, OwnerId owner);

  // Write a set as a bitmap of so many words of 32 owners; all its owners must fit.
  void write_bitmap(SetId set, uint32_t* words, size_t count) const;

  // Count a further user of a set, or one less. The empty set is not counted.
  void acquire(SetId set) {
    if (set != kNoOwners) ++sets_[set].users;
  }
  void release(SetId set);

  bool contains(SetId set, OwnerId owner) const { return sets_[set].contains(owner); }
  uint32_t size(SetId set) const { return sets_[set].size; }
  size_t distinct() const { return distinct_; }

  template <class Visit>
  void for_each(SetId set, Visit&& visit) const {
    const Set& found = sets_[set];
    if (!found.bitmap) {
      const OwnerId* list = found.list();
      for (uint32_t i = 0; i < found.size; ++i) visit(list[i]);
      return;
    }
    for (uint32_t word = 0; word < found.words; ++word) {
      for (uint32_t bits = found.many[word]; bits != 0; bits &= bits - 1) {
        visit(OwnerId{word * 32 + static_cast<uint32_t>(std::countr_zero(bits))});
      }
    }
  }

 private:
  static constexpr uint32_t kInline = 2;

  struct Set {
    uint64_t hash = 0;
    uint32_t users = 0;
    uint32_t size = 0;
    uint32_t words = 0;  // of the bitmap
    bool bitmap = false;
    OwnerId few[kInline] = {};
    std::unique_ptr<uint32_t[]> many;  // the bitmap, or the list when it is longer than `few`

    const OwnerId* list() const { return size <= kInline ? few : many.get(); }
    const uint32_t* kept() const { return bitmap ? many.get() : list(); }
    size_t length() const { return bitmap ? words : size; }
    bool contains(OwnerId owner) const;
  };

  uint64_t mark(OwnerId owner) const;
  static bool is_bitmap(uint32_t size, size_t words);
  // A set with an owner more (1) or less (-1, modulo 2**32).
  SetId changed(SetId id, OwnerId owner, uint32_t more);
  // The set that `draft_` is, so many owners as a bitmap or a list.
  SetId intern(uint64_t hash, uint32_t size, bool bitmap);
  void rehash(size_t slots);

  const uint64_t secret_;  // of the hashes, so that an engine cannot aim at one slot
  std::vector<Set> sets_;
  std::vector<SetId> free_;
  std::vector<SetId> slots_;  // open addressing by hash; 0 is empty
  std::vector<uint32_t> draft_;  // the set that is being looked for: a list, or a bitmap's words
  size_t distinct_ = 0;
};

}  // namespace kvindex
