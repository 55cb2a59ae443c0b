#include "core/labels.hpp"

#include <algorithm>
#include <utility>

#include "core/invariant.hpp"

namespace kvindex {

Labels::Labels(Tree& tree, const Owners& owners, LabelNames& names, Budget& budget,
               const Scramble& scramble)
    : tree_(tree), owners_(owners), names_(names), budget_(budget), ints_(scramble),
      named_(scramble), scramble_(scramble), several_(0, LabelHash(scramble)) {}

BlockRef Labels::newest(const Label& label) const { return table(label).find(label.value); }

BlockSet& Labels::Several::held_by(OwnerId owner, const Scramble& scramble) {
  for (auto& [some, own] : held) {
    if (some == owner) return own;
  }
  return held.emplace_back(owner, BlockSet(scramble)).second;
}

std::vector<BlockRef> Labels::held_in(const Label& label, OwnerId owner, Hold& hold) {
  Several& several = several_.find(label)->second;
  if (!several.sorted_by_owner) {
    several.blocks.for_each([&](BlockRef block) {
      for (const Copies& some : held(label, block)) {
        several.held_by(some.owner, scramble_).add(block);
      }
      hold.did(1);
    });
    several.sorted_by_owner = true;
  }
  std::vector<BlockRef> blocks;
  several.held_by(owner, scramble_).for_each([&](BlockRef block) { blocks.push_back(block); });
  return blocks;
}

bool Labels::placed(const Label& label, BlockRef block, BlockRef newest) const {
  if (newest == block) return true;
  if (newest == kNoBlock || several_.empty()) return false;
  const auto several = several_.find(label);
  return several != several_.end() && several->second.blocks.contains(block);
}

const std::vector<Copies>* Labels::written(const Label& label, BlockRef block) const {
  if (crowds_.empty()) return nullptr;
  const auto crowd = crowds_.find(block);
  if (crowd == crowds_.end()) return nullptr;
  const auto found = counted_.find({block, label});
  return found == counted_.end() ? &crowd->second.first : &found->second;
}

std::vector<Copies> Labels::held(const Label& label, BlockRef block) const {
  if (const std::vector<Copies>* all = written(label, block)) return *all;
  return shown(block);
}

// The copies of a block that has one label.
std::vector<Copies> Labels::shown(BlockRef block) const {
  std::vector<Copies> all;
  for (const OwnerId owner : places_) {
    if (const uint64_t count = shown(block, owner); count != 0) all.push_back({owner, count});
  }
  return all;
}

uint64_t Labels::shown(BlockRef block, OwnerId owner) const {
  if (!tree_.owned(block, owner)) return 0;
  if (further_.empty()) return 1;
  const auto further = further_.find(residence(block, owner));
  return further == further_.end() ? 1 : 1 + further->second;
}

uint64_t Labels::copies(const Label& label, BlockRef block, OwnerId owner) const {
  const std::vector<Copies>* const all = written(label, block);
  if (all == nullptr) return shown(block, owner);
  for (const Copies& copies : *all) {
    if (copies.owner == owner) return copies.count;
  }
  return 0;
}

bool Labels::in_group(const Label& label, BlockRef block, uint32_t group_idx) const {
  return std::any_of(places_.begin(), places_.end(), [&](OwnerId owner) {
    return owners_[owner].group_idx == group_idx && copies(label, block, owner) != 0;
  });
}

// Write down the copies of a block's only label, before the tree's owners are also those of others.
Labels::Crowd& Labels::crowd(BlockRef block) {
  const auto [some, is_new] = crowds_.try_emplace(block);
  if (is_new) {
    some->second = {1, shown(block)};
    for (const Copies& copies : some->second.first) further_.erase(residence(block, copies.owner));
  }
  return some->second;
}

// How many further (block, group) pairs there may be.
uint64_t Labels::room() const {
  const auto left = [](const std::optional<uint64_t>& limit, uint64_t used) {
    return !limit ? ~uint64_t{0} : *limit - std::min(*limit, used);
  };
  return std::min(left(budget_.rank_limit, size_), left(budget_.limit, budget_.used));
}

bool Labels::grow() {
  if (room() == 0) return false;
  ++size_;
  ++budget_.used;
  return true;
}

void Labels::put(const Label& label, BlockRef block) {
  const BlockRef before = table(label).add(label.value, block);
  names_.acquire(label);
  if (before == kNoBlock) return;
  table(label).replace(label.value, block);
  Several& several = several_.try_emplace(label, scramble_).first->second;
  several.blocks.add(before);  // if the label had only this one so far
  several.blocks.add(block);
  ++ambiguous_;
}

// Note that an owner has come to have copies of a block, or has none any more.
void Labels::note_held(const Label& label, BlockRef block, OwnerId owner, bool holds) {
  const auto several = several_.find(label);
  if (several == several_.end() || !several->second.sorted_by_owner) return;
  BlockSet& held = several->second.held_by(owner, scramble_);
  holds ? held.add(block) : held.erase(block);
}

size_t Labels::add_new(const Label* labels, const Stretch& blocks, OwnerId owner) {
  const BlockRef first = block_ref(blocks.strand, blocks.offset);
  const auto count = static_cast<uint32_t>(std::min<uint64_t>(blocks.count, room()));
  for (uint32_t i = 0; i < count; ++i) {
    put(labels[i], first + i);
    if (!several_.empty()) note_held(labels[i], first + i, owner, true);
  }
  size_ += count;
  budget_.used += count;
  if (count != 0) tally(first) += count;
  return count;
}

bool Labels::add(const Label& label, BlockRef block, OwnerId owner, uint64_t count) {
  const SetId owners = tree_.owners(block);
  const bool known_label = placed(label, block, newest(label));
  const uint64_t known = known_label ? copies(label, block, owner) : 0;
  const bool counts = known_label && in_group(label, block, owners_[owner].group_idx);
  if (!counts) {
    if (!grow()) return false;
    ++tally(block);
  }
  if (!known_label) put(label, block);
  if (known == 0 && !several_.empty()) note_held(label, block, owner, true);
  const uint64_t further = known != 0 ? count : count - 1;
  duplicates_ += further;
  std::vector<Copies>* all = nullptr;
  if (known_label) {
    all = written(label, block);
  } else if (is_held(owners)) {
    ++crowd(block).labels;
    all = &counted_.try_emplace({block, label}).first->second;
  }
  if (all == nullptr) {
    if (further != 0) further_[residence(block, owner)] += further;
  } else if (known == 0) {
    all->push_back({owner, count});
    if (tree_.sets().contains(owners, owner)) ++shared_[residence(block, owner)];
  } else {
    for (Copies& copies : *all) {
      if (copies.owner == owner) copies.count += count;
    }
  }
  return true;
}

// Whether the rank is among the owners of a block.
bool Labels::is_held(SetId owners) const {
  if (owners == kNoOwners) return false;
  return std::any_of(places_.begin(), places_.end(),
                     [&](OwnerId owner) { return tree_.sets().contains(owners, owner); });
}

bool Labels::drop(const Label& label, BlockRef block, OwnerId owner,
                  std::optional<uint64_t> left) {
  const uint64_t place = residence(block, owner);
  bool last_label = true;
  if (std::vector<Copies>* const all = written(label, block)) {
    const auto copies = std::find_if(all->begin(), all->end(),
                                     [&](const Copies& some) { return some.owner == owner; });
    copies->count = left.value_or(copies->count - 1);
    if (copies->count != 0) return false;
    all->erase(copies);
    if (const auto shared = shared_.find(place); shared != shared_.end()) {
      last_label = false;
      if (--shared->second == 0) shared_.erase(shared);
    }
  } else {
    const auto further = further_.find(place);
    const uint64_t rest = left.value_or(further == further_.end() ? 0 : further->second);
    if (rest > 1) {
      further_[place] = rest - 1;
    } else if (further != further_.end()) {
      further_.erase(further);
    }
    if (rest != 0) return false;
  }
  // The tree still shows the owner: leave it out of what is left.
  const uint32_t group_idx = owners_[owner].group_idx;
  bool any = false;
  bool any_in_group = false;
  for (const OwnerId other : places_) {
    if (other == owner || copies(label, block, other) == 0) continue;
    any = true;
    any_in_group = any_in_group || owners_[other].group_idx == group_idx;
  }
  if (!any_in_group) {
    --size_;
    --budget_.used;
    --tally(block);
  }
  if (!several_.empty()) note_held(label, block, owner, false);
  if (!any) forget(label, block);
  return last_label;
}

void Labels::forget(const Label& label, BlockRef block) {
  if (const auto crowd = crowds_.find(block); crowd != crowds_.end()) {
    counted_.erase({block, label});
    if (--crowd->second.labels == 0) crowds_.erase(crowd);
  }
  const auto several = several_.empty() ? several_.end() : several_.find(label);
  if (several == several_.end()) {
    table(label).erase(label.value);
  } else {
    BlockSet& blocks = several->second.blocks;
    blocks.erase(block);
    table(label).replace(label.value, blocks.newest());
    if (blocks.size() == 1) several_.erase(several);
  }
  names_.release(label);
}

bool Labels::is_plain(const Label& label, BlockRef block) const {
  if (crowds_.empty() && further_.empty()) return true;
  return std::all_of(places_.begin(), places_.end(), [&](OwnerId owner) {
    return copies(label, block, owner) == (tree_.owned(block, owner) ? 1u : 0u);
  });
}

void Labels::restore(const Label& label, BlockRef block, uint64_t groups) {
  size_ += groups;
  budget_.used += groups;
  tally(block) += groups;
  put(label, block);
}

void Labels::restore_order(const Label& label, const std::vector<BlockRef>& oldest_first) {
  const auto several = several_.find(label);
  if (several == several_.end()) return;
  BlockSet listed(scramble_);
  for (const BlockRef block : oldest_first) listed.add(block);
  BlockSet& blocks = several->second.blocks;
  BlockSet ordered(scramble_);
  blocks.for_each([&](BlockRef block) {
    if (!listed.contains(block)) ordered.add(block);
  });
  listed.for_each([&](BlockRef block) {
    if (blocks.contains(block)) ordered.add(block);
  });
  blocks = std::move(ordered);
  table(label).replace(label.value, blocks.newest());
}

void Labels::restore_copies(BlockRef block, const std::vector<Copies>& copies) {
  if (const auto crowd = crowds_.find(block); crowd != crowds_.end()) {
    crowd->second.first = copies;
    return;
  }
  for (const Copies& some : copies) {
    if (some.count > 1) further_[residence(block, some.owner)] = some.count - 1;
  }
}

void Labels::restore_further(const Label& label, BlockRef block,
                             const std::vector<Copies>& copies) {
  ++crowd(block).labels;
  counted_[{block, label}] = copies;
}

void Labels::count_shared() {
  std::unordered_map<uint64_t, uint64_t> labels;
  const auto add = [&](BlockRef block, const std::vector<Copies>& copies) {
    for (const Copies& some : copies) ++labels[residence(block, some.owner)];
  };
  for (const auto& [block, crowd] : crowds_) add(block, crowd.first);
  for (const auto& [placement, copies] : counted_) add(placement.block, copies);
  for (const auto& [place, count] : labels) {
    if (count > 1) shared_[place] = count - 1;
  }
}

void Labels::drop_places(const std::vector<OwnerId>& owners, Hold& hold) {
  for (const OwnerId owner : owners) {
    std::vector<std::pair<BlockRef, Label>> held;
    placements([&](const Label& label, BlockRef block) {
      if (copies(label, block, owner) != 0) held.emplace_back(block, label);
      hold.did(1);
    });
    for (const auto& [block, label] : held) {
      if (drop(label, block, owner, 0)) tree_.disown(block, owner);
      hold.did(1);
    }
  }
}

void Labels::clear(Hold& hold) {
  std::vector<BlockRef> blocks;
  blocks.reserve(ints_.size() + named_.size());
  placements([&](const Label& label, BlockRef block) {
    blocks.push_back(block);
    names_.release(label);
    hold.did(1);
  });
  // Backwards: ends of strands first, so that most of what is dropped is only cut off.
  const auto sort = [&] {
    std::sort(blocks.begin(), blocks.end(), std::greater<>());
    blocks.erase(std::unique(blocks.begin(), blocks.end()), blocks.end());
  };
  blocks.size() < Hold::kBlocks ? sort() : hold.aside(sort);
  for (size_t i = 0; i < blocks.size();) {
    // A stretch of neighbours in one strand. A strand may be dropped by what comes before it, but
    // not while the rank holds a block of it.
    size_t stop = i + 1;
    while (stop < blocks.size() && blocks[stop] == blocks[stop - 1] - 1 &&
           strand_of(blocks[stop]) == strand_of(blocks[i])) {
      ++stop;
    }
    const Stretch stretch{strand_of(blocks[i]), offset_of(blocks[stop - 1]),
                          static_cast<uint32_t>(stop - i)};
    for (size_t place = 0; place < places_.size(); ++place) {
      tree_.release(stretch, places_[place]);
    }
    tree_.prune(blocks[i]);
    hold.did(stretch.count + places_.size());
    i = stop;
  }
  budget_.used -= size_;
  size_ = 0;
  prompts_.clear();
  tally_ = nullptr;
  struct {
    LabelTable ints, named;
    Ambiguous several;
    std::unordered_map<uint64_t, uint64_t> further;
    std::map<BlockRef, Crowd> crowds;
    std::map<Placement, std::vector<Copies>> counted;
    std::map<uint64_t, uint64_t> shared;
  } gone{LabelTable(scramble_), LabelTable(scramble_), Ambiguous(0, several_.hash_function()),
         {}, {}, {}, {}};
  std::swap(gone.ints, ints_);
  std::swap(gone.named, named_);
  gone.several.swap(several_);
  gone.further.swap(further_);
  gone.crowds.swap(crowds_);
  gone.counted.swap(counted_);
  gone.shared.swap(shared_);
  if (blocks.size() < Hold::kBlocks) return;
  hold.aside([&] {
    { const auto dropped = std::move(gone); }
    std::vector<BlockRef>().swap(blocks);  // the allocator tidies up now, and takes long
  });
}

void Labels::make_room(const Label& label, size_t labels, Hold& hold) {
  constexpr size_t kQuick = 16'384;
  LabelTable& some = table(label);
  if (some.size() > kQuick && some.must_grow(labels)) hold.aside([&] { some.grow(labels); });
}

void Labels::check(std::vector<uint64_t>& resident) const {
  uint64_t size = 0;
  std::unordered_map<uint64_t, uint64_t> labels;
  std::unordered_map<uint64_t, uint64_t> prompts;
  std::unordered_map<BlockRef, uint64_t> by_block;
  placements([&](const Label& label, BlockRef block) {
    const std::vector<Copies> all = held(label, block);
    ++by_block[block];
    require(!all.empty(), "a label without copies");
    std::vector<uint32_t> groups;
    for (const Copies& copies : all) {
      require(copies.count != 0, "a place without copies");
      require(tree_.owned(block, copies.owner), "a label's block that the tree knows nothing of");
      if (labels[residence(block, copies.owner)]++ == 0) ++resident[copies.owner];
      groups.push_back(owners_[copies.owner].group_idx);
    }
    std::sort(groups.begin(), groups.end());
    const auto count =
        static_cast<uint64_t>(std::unique(groups.begin(), groups.end()) - groups.begin());
    size += count;
    prompts[prompts_of(block)] += count;
  });
  require(size == size_, std::to_string(size) + " blocks resident, counted " + std::to_string(size_));
  for (const auto& [some, count] : prompts_) {
    const auto found = prompts.find(some);
    require(count == (found == prompts.end() ? 0 : found->second),
            "blocks by LoRA and salt are miscounted");
  }
  for (const auto& [place, count] : labels) {
    const auto shared = shared_.find(place);
    const uint64_t known = shared == shared_.end() ? 0 : shared->second;
    require(count - 1 == known, "labels that share a block are miscounted");
  }
  uint64_t crowded = 0;
  for (const auto& [block, count] : by_block) {
    const auto crowd = crowds_.find(block);
    crowded += crowd != crowds_.end();
    require(crowd == crowds_.end() ? count == 1 : count == crowd->second.labels,
            "a block's labels are miscounted");
  }
  require(crowded == crowds_.size(), "labels are counted of what is not resident");
  for (const auto& [place, count] : further_) {
    require(count != 0 && labels.contains(place), "further copies of what is not resident");
  }
}

}  // namespace kvindex
