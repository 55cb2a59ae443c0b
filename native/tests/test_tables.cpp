// The containers under the tree, each against the standard library's obviously right one.
#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/few.hpp"
#include "core/head_table.hpp"
#include "core/label.hpp"
#include "core/label_table.hpp"
#include "core/owner_sets.hpp"
#include "core/strand.hpp"
#include "tests/expect.hpp"
#include "tests/made_batch.hpp"

namespace {

using namespace kvindex;
using namespace kvindex::tests;

void test_scramble_is_a_bijection(Choices& choices) {
  const Scramble scramble(choices.word(), choices.word(), choices.word());
  for (int i = 0; i < 1000; ++i) {
    const uint64_t label = choices.once_in(2) ? choices.word() : choices.below(10);
    EXPECT(scramble.back(scramble(label)) == label);
  }
}

// Labels come and go, in waves, so that the table grows, shrinks and is full of deleted places.
void test_label_table(Choices& choices, const Scramble& scramble, uint64_t universe) {
  LabelTable table(scramble);
  std::unordered_map<uint64_t, BlockRef> model;
  const auto compare = [&] {
    std::unordered_map<uint64_t, BlockRef> found;
    table.for_each([&](uint64_t label, BlockRef block) { found[label] = block; });
    EXPECT(found == model && table.size() == model.size());
  };
  uint32_t adding = 80;
  for (int step = 0; step < 30'000; ++step) {
    if (step % 3000 == 0) adding = adding == 80 ? 20 : 80;
    const uint64_t label = choices.below(universe);
    const BlockRef block = choices.below(kNoBlock);
    const auto known = model.find(label);
    table.prefetch(label);
    EXPECT(table.find(label) == (known == model.end() ? kNoBlock : known->second));
    if (choices.below(100) < adding) {
      EXPECT(table.add(label, block) == (known == model.end() ? kNoBlock : known->second));
      if (known == model.end()) {
        model[label] = block;
      } else if (choices.once_in(2)) {
        table.replace(label, block);
        known->second = block;
      }
    } else if (known != model.end()) {
      table.erase(label);
      model.erase(known);
    }
    if (step % 500 == 0) compare();
  }
  compare();
  while (!model.empty()) {
    table.erase(model.begin()->first);
    model.erase(model.begin());
  }
  compare();
  table.add(1, 1);
  table.clear();
  compare();
}

void test_owner_sets(Choices& choices, OwnerId most) {
  OwnerSets sets(choices.word());
  std::map<std::set<OwnerId>, std::pair<SetId, int>> model;  // number and references
  std::vector<std::set<OwnerId>> held{{}};
  std::vector<SetId> ids{kNoOwners};
  for (int step = 0; step < 4000; ++step) {
    const size_t at = choices.below(held.size());
    std::set<OwnerId> changed = held[at];
    const OwnerId owner = choices.below(most);
    EXPECT(sets.contains(ids[at], owner) == changed.contains(owner));
    SetId id;
    if (changed.contains(owner)) {
      changed.erase(owner);
      id = sets.without(ids[at], owner);
    } else {
      changed.insert(owner);
      id = sets.with(ids[at], owner);
    }
    if (choices.once_in(4)) {
      sets.acquire(id);
      sets.release(id);
    }
    EXPECT((id == kNoOwners) == changed.empty() && sets.size(id) == changed.size());
    if (!changed.empty()) {
      const auto [known, is_new] = model.try_emplace(changed, id, 0);
      EXPECT(known->second.first == id);  // equal sets have equal numbers
      ++known->second.second;
      held.push_back(changed);
      ids.push_back(id);
    }
    std::vector<OwnerId> members;
    sets.for_each(id, [&](OwnerId member) { members.push_back(member); });
    EXPECT(std::equal(members.begin(), members.end(), changed.begin(), changed.end()));
    std::vector<uint32_t> words((most + 31) / 32, 0xdeadbeefu);
    sets.write_bitmap(id, words.data(), words.size());
    for (OwnerId i = 0; i < most; ++i) {
      EXPECT((words[i / 32] >> (i % 32) & 1) == changed.contains(i));
    }
    while (held.size() > (step < 3000 ? 200u : 1u)) {
      const size_t gone = 1 + choices.below(held.size() - 1);
      sets.release(ids[gone]);
      const auto known = model.find(held[gone]);
      if (--known->second.second == 0) model.erase(known);
      held.erase(held.begin() + static_cast<ptrdiff_t>(gone));
      ids.erase(ids.begin() + static_cast<ptrdiff_t>(gone));
    }
    EXPECT(sets.distinct() == model.size());
  }
  EXPECT(sets.distinct() == 0);
}

void test_few(Choices& choices) {
  Few<uint64_t> few;
  std::vector<uint64_t> model;
  for (uint64_t step = 0; step < 20'000; ++step) {
    const auto at = static_cast<ptrdiff_t>(choices.below(model.size() + 1));
    switch (choices.below(step % 2000 < 1000 ? 4 : 7)) {
      case 0: case 1: case 2:
        if (model.size() == 255) break;
        few.insert(few.begin() + at, step);
        model.insert(model.begin() + at, step);
        break;
      case 3: {
        Few<uint64_t> moved = std::move(few);
        EXPECT(few.empty());
        few = std::move(moved);
        break;
      }
      case 4: case 5:
        if (at == static_cast<ptrdiff_t>(model.size())) break;
        few.erase(few.begin() + at);
        model.erase(model.begin() + at);
        break;
      default:
        if (!choices.once_in(50)) break;
        model.assign(choices.below(256), 3u);
        few.assign(model.data(), static_cast<uint8_t>(model.size()));
    }
    EXPECT(few.size() == model.size() && std::equal(few.begin(), few.end(), model.begin()));
    if (!model.empty()) EXPECT(few.back() == model.back());
  }
  few.clear();
  EXPECT(few.empty());
}

// Few tags, so that whole stretches of the table have the same one.
void test_head_table(Choices& choices) {
  HeadTable table;
  std::map<uint32_t, Key> model;
  for (int step = 0; step < 20'000; ++step) {
    const bool growing = step % 4000 < 2500;
    if (growing || model.empty()) {
      const Key key = Key{choices.below(40)} << 32 | choices.below(4);
      const auto strand = static_cast<uint32_t>(step);
      table.insert(key, strand);
      model[strand] = key;
    } else {
      const auto gone = std::next(model.begin(), choices.below(std::min<size_t>(model.size(), 30)));
      table.erase(gone->second, gone->first);
      model.erase(gone);
    }
    EXPECT(table.size() == model.size());
    if (model.empty()) continue;
    const size_t any = choices.below(std::min<size_t>(model.size(), 50));
    const auto known = std::next(model.begin(), static_cast<ptrdiff_t>(any));
    const auto is_it = [&](uint32_t strand) { return strand == known->first; };
    EXPECT(table.find(known->second, kNoStrand, is_it) == known->first);
    EXPECT(table.find(known->second, kNoStrand, [](uint32_t) { return false; }) == kNoStrand);
  }
  while (!model.empty()) {
    table.erase(model.begin()->second, model.begin()->first);
    model.erase(model.begin());
  }
  EXPECT(table.size() == 0 && table.find(1, kNoStrand, [](uint32_t) { return true; }) == kNoStrand);
}

void test_strand_pool(Choices& choices) {
  StrandPool pool;
  std::map<StrandId, uint32_t> model;  // the mark that each strand carries as its depth
  for (int wave = 0; wave < 6; ++wave) {
    for (uint32_t step = 0; step < 4000; ++step) {
      if (choices.below(100) < (wave % 2 == 0 ? 80u : 15u)) {
        const StrandId id = pool.make();
        EXPECT(id != kNoStrand && !model.contains(id) && pool[id].count == 0);
        pool[id].count = 1;
        pool[id].depth = model[id] = step;
      } else if (!model.empty()) {
        const size_t any = choices.below(std::min<size_t>(model.size(), 600));
        const auto gone = std::next(model.begin(), static_cast<ptrdiff_t>(any));
        pool.drop(gone->first);
        model.erase(gone);
      }
    }
    std::map<StrandId, uint32_t> found;
    pool.for_each([&](StrandId id, const Strand& strand) { found[id] = strand.depth; });
    EXPECT(found == model && pool.size() == model.size());
  }
  for (const auto& strand : model) pool.drop(strand.first);
  EXPECT(pool.size() == 0);
  EXPECT(pool.make() < 256);  // numbers are used again
}

void test_strand_room() {
  Strand strand;
  for (unsigned count = 1; count <= kStrandBlocks; ++count) {
    strand.reserve(count);
    EXPECT(strand.capacity >= count && strand.capacity <= kStrandBlocks);
    strand.keys[count - 1] = count;
    strand.count = static_cast<uint8_t>(count);
  }
  for (unsigned count = kStrandBlocks; count >= 1; --count) {
    strand.count = static_cast<uint8_t>(count);
    strand.fit();
    EXPECT(strand.capacity >= count && strand.keys[count - 1] == count);
  }
  EXPECT(strand.capacity <= 8);
}

void test_label_names(Choices& choices) {
  const KeyMaker keys(made_secrets(choices.word()));
  LabelNames names(keys);
  std::map<std::string, std::pair<uint64_t, int>> model;
  for (int step = 0; step < 20'000; ++step) {
    const std::string name(1 + choices.below(40), static_cast<char>('a' + choices.below(3)));
    const auto known = model.find(name);
    EXPECT(names.find(name) == (known == model.end() ? LabelNames::kUnknown : known->second.first));
    if (choices.once_in(2)) {
      const Label label{names.number(name), true};
      names.acquire(label);
      EXPECT(names.text(label) == name);
      if (known == model.end()) {
        model[name] = {label.value, 1};
      } else {
        EXPECT(known->second.first == label.value);
        ++known->second.second;
      }
    } else if (known != model.end()) {
      names.release({known->second.first, true});
      if (--known->second.second == 0) model.erase(known);
    }
    EXPECT(names.size() == model.size());
  }
}

// How many of some keys have the same 32 bits there as another one.
size_t repeated(const std::vector<Key>& keys, unsigned shift) {
  std::vector<uint32_t> pieces;
  for (const Key key : keys) pieces.push_back(static_cast<uint32_t>(key >> shift));
  std::sort(pieces.begin(), pieces.end());
  return keys.size() -
         static_cast<size_t>(std::unique(pieces.begin(), pieces.end()) - pieces.begin());
}

// What docs/guarantees.md supposes of keys, shown on pieces of them: those of like blocks meet as
// often as random numbers do, be it that the blocks differ or only what comes before them.
void test_prefix_keys(Choices& choices) {
  constexpr size_t kCount = 1 << 17;
  constexpr size_t kTooMany = 40;  // 2 are expected
  const KeyMaker maker(made_secrets(choices.word()));
  const Key parent = choices.word();
  for (const uint32_t place : {0u, 1u, 7u, 15u}) {
    std::vector<uint32_t> tokens(16, 7);
    const Digest same = maker.tokens(tokens.data(), tokens.size());
    std::vector<Key> siblings;
    std::vector<Key> followers;
    for (size_t i = 0; i < kCount; ++i) {
      tokens[place] = static_cast<uint32_t>(i);
      siblings.push_back(maker.child(parent, maker.tokens(tokens.data(), tokens.size())));
      followers.push_back(maker.child(i << place, same));
    }
    for (const unsigned shift : {0u, 16u, 32u}) {
      EXPECT(repeated(siblings, shift) < kTooMany);
      EXPECT(repeated(followers, shift) < kTooMany);
    }
  }
}

}  // namespace

int main() {
  for (int seed = 0; seed < rounds(3); ++seed) {
    Choices choices(static_cast<uint64_t>(seed));
    test_scramble_is_a_bijection(choices);
    const Scramble secret(choices.word(), choices.word(), choices.word());
    const Scramble none(0, 1, 1);  // leaves small labels as they are: all belong to one place
    test_label_table(choices, secret, 20'000);
    test_label_table(choices, secret, 12);
    test_label_table(choices, none, 300);
    test_owner_sets(choices, 6);
    test_owner_sets(choices, 300);
    test_few(choices);
    test_head_table(choices);
    test_strand_pool(choices);
    test_label_names(choices);
    test_prefix_keys(choices);
  }
  test_strand_room();
}
