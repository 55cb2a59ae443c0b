#include "core/owner_sets.hpp"

#include <algorithm>
#include <utility>

namespace kvindex {

namespace {

constexpr size_t kFewestSlots = 64;

}  // namespace

bool OwnerSets::is_bitmap(uint32_t size, size_t words) { return size > kInline && words <= size; }

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

SetId OwnerSets::with(SetId set, OwnerId owner) { return changed(set, owner, 1); }

SetId OwnerSets::without(SetId set, OwnerId owner) {
  return sets_[set].size == 1 ? kNoOwners : changed(set, owner, ~uint32_t{0});
}

SetId OwnerSets::changed(SetId id, OwnerId owner, uint32_t more) {
  const Set& before = sets_[id];
  const uint32_t size = before.size + more;
  const size_t word = owner / 32;
  if (before.bitmap) {  // word by word, however many owners there are
    draft_.assign(before.many.get(), before.many.get() + before.words);
    if (word >= draft_.size()) draft_.resize(word + 1);
    draft_[word] ^= uint32_t{1} << (owner % 32);
    while (draft_.back() == 0) draft_.pop_back();
    if (is_bitmap(size, draft_.size())) return intern(before.hash ^ mark(owner), size, true);
    draft_.clear();
    for_each(id, [&](OwnerId member) { draft_.push_back(member); });
  } else {
    draft_.assign(before.list(), before.list() + before.size);
  }
  const auto at = std::lower_bound(draft_.begin(), draft_.end(), owner);
  if (size > before.size) {
    draft_.insert(at, owner);
  } else {
    draft_.erase(at);
  }
  const size_t words = draft_.back() / 32 + 1;
  const bool bitmap = is_bitmap(size, words);
  if (bitmap) {
    const std::vector<OwnerId> members = std::exchange(draft_, std::vector<uint32_t>(words));
    for (const OwnerId member : members) draft_[member / 32] |= uint32_t{1} << (member % 32);
  }
  return intern(before.hash ^ mark(owner), size, bitmap);
}

SetId OwnerSets::intern(uint64_t hash, uint32_t size, bool bitmap) {
  const size_t mask = slots_.size() - 1;
  size_t slot = hash & mask;
  for (; slots_[slot] != 0; slot = (slot + 1) & mask) {
    Set& found = sets_[slots_[slot]];
    if (found.hash == hash && found.size == size && found.bitmap == bitmap &&
        std::equal(draft_.begin(), draft_.end(), found.kept(), found.kept() + found.length())) {
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
  made.size = size;
  made.bitmap = bitmap;
  made.words = bitmap ? static_cast<uint32_t>(draft_.size()) : 0;
  if (size > kInline) made.many = std::make_unique<uint32_t[]>(draft_.size());
  std::copy(draft_.begin(), draft_.end(), size > kInline ? made.many.get() : made.few);
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
