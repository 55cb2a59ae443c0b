#include "core/label_table.hpp"

#include <algorithm>
#include <bit>
#include <utility>

namespace kvindex {

namespace {

constexpr uint64_t kLow = 0x0101010101010101u;   // the lowest bit of each byte
constexpr uint64_t kHigh = 0x8080808080808080u;  // the highest

// The tags of a group as a number whose lowest byte is the first one.
uint64_t load(const uint8_t* tags) {
  uint64_t word;
  std::memcpy(&word, tags, sizeof word);
  if constexpr (std::endian::native == std::endian::big) word = __builtin_bswap64(word);
  return word;
}

// The highest bit of each byte that is so. `equal` may err behind a byte that is: entries decide.
uint64_t equal(uint64_t word, uint8_t tag) {
  const uint64_t differing = word ^ kLow * tag;
  return (differing - kLow) & ~differing & kHigh;
}
uint64_t empty(uint64_t word) { return word & ~(word << 6) & kHigh; }
uint64_t vacant(uint64_t word) { return word & kHigh; }  // empty or deleted

size_t first(uint64_t bits) { return static_cast<size_t>(std::countr_zero(bits)) / 8; }

}  // namespace

// Where a mark is, or kNowhere.
size_t LabelTable::locate(uint64_t mark) const {
  if (size_ == 0) return kNowhere;
  for (size_t group = home(mark);; group = after(group)) {
    const uint64_t word = load(tags(group));
    for (uint64_t bits = equal(word, tag_of(mark)); bits != 0; bits &= bits - 1) {
      const size_t place = group * kGroup + first(bits);
      if (this->mark(place) == mark) return place;
    }
    if (empty(word) != 0) return kNowhere;
  }
}

BlockRef LabelTable::find(uint64_t label) const {
  const size_t place = locate((*scramble_)(label));
  return place == kNowhere ? kNoBlock : block(place);
}

BlockRef LabelTable::add(uint64_t label, BlockRef block) {
  if ((used_ + 1) * 10 > groups_ * kGroup * 9) rehash();
  const uint64_t mark = (*scramble_)(label);
  size_t place = kNowhere;  // the first that is vacant
  for (size_t group = home(mark);; group = after(group)) {
    const uint64_t word = load(tags(group));
    for (uint64_t bits = equal(word, tag_of(mark)); bits != 0; bits &= bits - 1) {
      const size_t found = group * kGroup + first(bits);
      if (this->mark(found) == mark) return this->block(found);
    }
    if (place == kNowhere && vacant(word) != 0) place = group * kGroup + first(vacant(word));
    if (empty(word) != 0) break;
  }
  used_ += memory_.data()[place] == kEmpty;
  ++size_;
  put(place, mark, block);
  return kNoBlock;
}

void LabelTable::replace(uint64_t label, BlockRef block) {
  const uint64_t mark = (*scramble_)(label);
  put(locate(mark), mark, block);
}

void LabelTable::erase(uint64_t label) {
  const size_t place = locate((*scramble_)(label));
  // A search that came by here goes on only if the group was full.
  const bool ends_here = empty(load(tags(place / kGroup))) != 0;
  memory_.data()[place] = ends_here ? kEmpty : kDeleted;
  used_ -= ends_here;
  if (--size_ * 3 < groups_ * kGroup && groups_ > 4) rehash();
}

void LabelTable::clear() {
  memory_ = Pages();
  groups_ = size_ = used_ = 0;
}

// Put everything into a table that has room for a third more.
void LabelTable::rehash() {
  LabelTable other(*scramble_);
  other.groups_ = (size_ + size_ / 2) / kGroup + 1;
  other.memory_ = Pages(other.groups_ * kGroup * (1 + kEntry));
  std::memset(other.memory_.data(), kEmpty, other.groups_ * kGroup);
  other.size_ = other.used_ = size_;
  for (size_t place = 0; place < groups_ * kGroup; ++place) {
    if (memory_.data()[place] >= kEmpty) continue;
    const uint64_t mark = this->mark(place);
    size_t group = other.home(mark);
    uint64_t vacancies;
    while ((vacancies = vacant(load(other.tags(group)))) == 0) group = other.after(group);
    other.put(group * kGroup + first(vacancies), mark, block(place));
  }
  *this = std::move(other);
}

}  // namespace kvindex
