#include "core/owner_sets.hpp"

#include <algorithm>

namespace kvindex {

namespace {

constexpr size_t kFewestSlots = 64;

}  // namespace

OwnerSets::OwnerSets(uint64_t secret) : secret_(secret), sets_(1), slots_(kFewestSlots) {}

// A set's hash is the exclusive or of its owners' marks, so that it follows each change at once.
uint64_t OwnerSets::mark(OwnerId owner) const {
  uint64_t x = secret_ + (uint64_t{owner} + 1) * 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

bool OwnerSets::Set::contains(OwnerId owner) const {
  if (bitmap) return owner / 32 < words && (many[owner / 32] >> (owner % 32) & 1) != 0;
  const OwnerId* first = list();
  if (size <= 8) return std::find(first, first + size, owner) != first + size;
  return std::binary_search(first, first + size, owner);
}

void OwnerSets::write_bitmap(SetId set, uint32_t* words, size_t count) const {
  const Set& found = sets_[set];
  if (found.bitmap) {
    std::copy(found.many.get(), found.many.get() + found.words, words);
    std::fill(words + found.words, words + count, 0u);
    return;
  }
  std::fill(words, words + count, 0u);
  const OwnerId* list = found.list();
  for (uint32_t i = 0; i < found.size; ++i) words[list[i] / 32] |= uint32_t{1} << (list[i] % 32);
}

SetId OwnerSets::with(SetId set, OwnerId owner) {
  members_.clear();
  for_each(set, [&](OwnerId member) { members_.push_back(member); });
  members_.insert(std::lower_bound(members_.begin(), members_.end(), owner), owner);
  return intern(sets_[set].hash ^ mark(owner));
}

SetId OwnerSets::without(SetId set, OwnerId owner) {
  if (sets_[set].size == 1) return kNoOwners;
  members_.clear();
  for_each(set, [&](OwnerId member) {
    if (member != owner) members_.push_back(member);
  });
  return intern(sets_[set].hash ^ mark(owner));
}

SetId OwnerSets::intern(uint64_t hash) {
  const size_t mask = slots_.size() - 1;
  size_t slot = hash & mask;
  for (; slots_[slot] != 0; slot = (slot + 1) & mask) {
    Set& found = sets_[slots_[slot]];
    if (found.hash == hash && same(found, members_)) {
      ++found.users;
      return slots_[slot];
    }
  }
  SetId id;
  if (free_.empty()) {
    id = static_cast<SetId>(sets_.size());
    sets_.emplace_back();
  } else {
    id = free_.back();
    free_.pop_back();
  }
  Set& made = sets_[id];
  made.hash = hash;
  made.users = 1;
  assign(made, members_);
  slots_[slot] = id;
  if (++distinct_ * 2 > slots_.size()) rehash(slots_.size() * 2);
  return id;
}

void OwnerSets::release(SetId set) {
  if (set == kNoOwners || --sets_[set].users != 0) return;
  const size_t mask = slots_.size() - 1;
  size_t hole = sets_[set].hash & mask;
  while (slots_[hole] != set) hole = (hole + 1) & mask;
  for (size_t next = (hole + 1) & mask; slots_[next] != 0; next = (next + 1) & mask) {
    const size_t home = sets_[slots_[next]].hash & mask;
    if (((next - home) & mask) >= ((next - hole) & mask)) {
      slots_[hole] = slots_[next];
      hole = next;
    }
  }
  slots_[hole] = 0;
  sets_[set] = Set{};
  free_.push_back(set);
  if (--distinct_ == 0) {
    sets_.resize(1);
    sets_.shrink_to_fit();
    free_ = std::vector<SetId>();
    slots_.assign(kFewestSlots, 0);
    slots_.shrink_to_fit();
  } else if (distinct_ * 8 < slots_.size() && slots_.size() > kFewestSlots) {
    rehash(slots_.size() / 2);
  }
}

void OwnerSets::assign(Set& set, const std::vector<OwnerId>& owners) const {
  set.size = static_cast<uint32_t>(owners.size());
  set.words = owners.back() / 32 + 1;
  set.bitmap = owners.size() > kInline && set.words <= owners.size();
  if (set.bitmap) {
    set.many = std::make_unique<uint32_t[]>(set.words);
    for (const OwnerId owner : owners) set.many[owner / 32] |= uint32_t{1} << (owner % 32);
  } else if (owners.size() > kInline) {
    set.many = std::make_unique<uint32_t[]>(owners.size());
    std::copy(owners.begin(), owners.end(), set.many.get());
  } else {
    std::copy(owners.begin(), owners.end(), set.few);
  }
}

bool OwnerSets::same(const Set& set, const std::vector<OwnerId>& owners) const {
  if (set.size != owners.size()) return false;
  if (!set.bitmap) return std::equal(owners.begin(), owners.end(), set.list());
  return std::all_of(owners.begin(), owners.end(),
                     [&](OwnerId owner) { return set.contains(owner); });
}

void OwnerSets::rehash(size_t slots) {
  slots_.assign(slots, 0);
  slots_.shrink_to_fit();
  for (SetId id = 1; id < sets_.size(); ++id) {
    if (sets_[id].users == 0) continue;
    size_t slot = sets_[id].hash & (slots - 1);
    while (slots_[slot] != 0) slot = (slot + 1) & (slots - 1);
    slots_[slot] = id;
  }
}

}  // namespace kvindex
