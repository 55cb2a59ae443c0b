#include "core/label_table.hpp"

#include <utility>

namespace kvindex {

// The slot of a mark in a bucket, or kSlots. All slots are compared, without a branch on how many
// are used: that could not be predicted. What an unused one holds does not matter.
unsigned LabelTable::slot_of(const Bucket& bucket, uint64_t mark) {
  unsigned equal = 0;
  for (unsigned slot = 0; slot < kSlots; ++slot) {
    equal |= static_cast<unsigned>(bucket.entries[slot].mark() == mark) << slot;
  }
  equal &= (1u << bucket.used) - 1;
  return equal == 0 ? kSlots : static_cast<unsigned>(__builtin_ctz(equal));
}

LabelTable::Place LabelTable::locate(uint64_t mark) const {
  if (size_ == 0) return {0, kSlots};
  const size_t first = home(mark);
  size_t i = first;
  do {
    const Bucket& some = bucket(i);
    const unsigned slot = slot_of(some, mark);
    if (slot != kSlots || some.passed == 0) return {i, slot};
    i = after(i);
  } while (i != first);  // in a table of few buckets each may have been passed by
  return {i, kSlots};
}

BlockRef LabelTable::find(uint64_t label) const {
  const Place place = locate((*scramble_)(label));
  return place.slot == kSlots ? kNoBlock : bucket(place.bucket).entries[place.slot].block;
}

BlockRef LabelTable::add(uint64_t label, BlockRef block) {
  const uint64_t mark = (*scramble_)(label);
  if (const Place known = locate(mark); known.slot != kSlots) {
    return bucket(known.bucket).entries[known.slot].block;
  }
  if (must_grow(1)) grow(1);
  put(mark, block);
  ++size_;
  return kNoBlock;
}

// Put a mark that is not there into the first bucket with room.
void LabelTable::put(uint64_t mark, BlockRef block) {
  size_t i = home(mark);
  while (bucket(i).used == kSlots) {
    ++bucket(i).passed;
    i = after(i);
  }
  Bucket& some = bucket(i);
  some.entries[some.used++] = {static_cast<uint32_t>(mark), static_cast<uint32_t>(mark >> 32),
                               block};
}

void LabelTable::replace(uint64_t label, BlockRef block) {
  const Place place = locate((*scramble_)(label));
  bucket(place.bucket).entries[place.slot].block = block;
}

void LabelTable::erase(uint64_t label) {
  const uint64_t mark = (*scramble_)(label);
  const Place place = locate(mark);
  for (size_t i = home(mark); i != place.bucket; i = after(i)) --bucket(i).passed;
  Bucket& some = bucket(place.bucket);
  some.entries[place.slot] = some.entries[--some.used];
  if (--size_ == 0) {
    clear();
  } else if (size_ * 3 < count_ * kSlots && count_ > 4) {
    rehash(size_ * 14 / 10);
  }
}

void LabelTable::clear() {
  memory_ = Pages();
  count_ = size_ = 0;
}

// Put everything into a table that has room for so many labels.
void LabelTable::rehash(size_t labels) {
  LabelTable other(*scramble_);
  other.count_ = (labels * 8 / 7) / kSlots + 1;
  other.memory_ = Pages(other.count_ * sizeof(Bucket));
  for (size_t i = 0; i < other.count_; ++i) other.bucket(i) = Bucket{};
  for (size_t i = 0; i < count_; ++i) {
    const Bucket& some = bucket(i);
    for (unsigned slot = 0; slot < some.used; ++slot) {
      other.put(some.entries[slot].mark(), some.entries[slot].block);
    }
  }
  other.size_ = size_;
  *this = std::move(other);
}

}  // namespace kvindex
