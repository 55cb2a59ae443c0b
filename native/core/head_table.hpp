// A table from the key of a strand's first block to the strand.
//
// Open addressing; an entry has 32 bits of the key, which decide nearly always. Several strands may
// share a key in theory, under different parents: the caller's test has the last word.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/prefix_key.hpp"

namespace kvindex {

class HeadTable {
 public:
  // The strand with this key for which `is_it(strand)` is true, or `none`.
  template <class Test>
  uint32_t find(Key key, uint32_t none, Test&& is_it) const {
    if (size_ == 0) return none;
    const uint32_t tag = tag_of(key);
    for (size_t i = home(tag); entries_[i].strand != kEmpty; i = after(i)) {
      if (entries_[i].tag == tag && is_it(entries_[i].strand)) return entries_[i].strand;
    }
    return none;
  }

  void insert(Key key, uint32_t strand) {
    if ((size_ + 1) * 4 > entries_.size() * 3) rehash(entries_.size() + entries_.size() / 2 + 16);
    put({tag_of(key), strand});
    ++size_;
  }

  // Remove a strand that is in the table.
  void erase(Key key, uint32_t strand) {
    size_t hole = home(tag_of(key));
    while (entries_[hole].strand != strand) hole = after(hole);
    for (size_t next = after(hole); entries_[next].strand != kEmpty; next = after(next)) {
      if (distance(home(entries_[next].tag), next) >= distance(hole, next)) {
        entries_[hole] = entries_[next];
        hole = next;
      }
    }
    entries_[hole] = Entry{};
    if (--size_ * 4 < entries_.size()) rehash(size_ * 2);
  }

  size_t size() const { return size_; }

 private:
  static constexpr uint32_t kEmpty = 0xffffffffu;

  struct Entry {
    uint32_t tag = 0;
    uint32_t strand = kEmpty;
  };

  static uint32_t tag_of(Key key) { return static_cast<uint32_t>(key >> 32); }
  size_t home(uint32_t tag) const { return tag * entries_.size() >> 32; }
  size_t after(size_t i) const { return i + 1 == entries_.size() ? 0 : i + 1; }
  size_t distance(size_t from, size_t to) const {
    return to >= from ? to - from : to + entries_.size() - from;
  }
  void put(Entry entry) {
    size_t i = home(entry.tag);
    while (entries_[i].strand != kEmpty) i = after(i);
    entries_[i] = entry;
  }
  void rehash(size_t places) {
    std::vector<Entry> old(places);
    old.swap(entries_);
    for (const Entry& entry : old) {
      if (entry.strand != kEmpty) put(entry);
    }
  }

  std::vector<Entry> entries_;
  size_t size_ = 0;
};

}  // namespace kvindex
