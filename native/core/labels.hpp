// A rank's labels: which blocks each of the engine's hashes names, and where copies of them are.
//
// Nearly always a label names one block, a block has one label, and there is one copy in each place
// that the tree knows as its owner. Then a label costs an entry of `LabelTable` and nothing else:
// its copies are read from the tree. What is rarer is kept beside: further copies (`further_`), and
// all blocks of a label that has several (`several_`). Of a block with a second label the tree can
// no longer tell whose copies it shows: those of its first label (`crowds_`) and of each further one
// (`counted_`) are written down, until the rank holds it no more.
//
// The Python twin is kvindex/index/reference/blocks.py. Owned by the index, under its lock.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/block_set.hpp"
#include "core/hold.hpp"
#include "core/label.hpp"
#include "core/label_table.hpp"
#include "core/owners.hpp"
#include "core/tree.hpp"

namespace kvindex {

// The resident (block, group) pairs of an index, and how many there may be.
struct Budget {
  std::optional<uint64_t> limit;
  std::optional<uint64_t> rank_limit;  // of one rank
  uint64_t used = 0;
};

// What is counted together: the prompts of a namespace that do, or do not, start under a salt or
// other extra keys.
struct Prompts {
  RootId root = 0;
  bool salted = false;
};

// Copies of a block in one place.
struct Copies {
  OwnerId owner = 0;
  uint64_t count = 0;
};

class Labels {
 public:
  Labels(Tree& tree, const Owners& owners, LabelNames& names, Budget& budget,
         const Scramble& scramble);

  uint64_t size() const { return size_; }  // resident (block, group) pairs
  bool full() const { return budget_.rank_limit && size_ >= *budget_.rank_limit; }
  uint64_t ambiguous() const { return ambiguous_; }    // how often a label named a further block
  uint64_t duplicates() const { return duplicates_; }  // further physical copies counted

  // The same by prompts: `visit(Prompts, blocks)`.
  template <class Visit>
  void each_prompts(Visit&& visit) const {
    for (const auto& [key, blocks] : prompts_) {
      if (blocks != 0) visit(Prompts{static_cast<RootId>(key >> 1), (key & 1) != 0}, blocks);
    }
  }

  // The places of the rank; `add` wants to know them all.
  std::vector<OwnerId>& places() { return places_; }
  const std::vector<OwnerId>& places() const { return places_; }

  // The newest block of a label, or kNoBlock.
  BlockRef newest(const Label& label) const;
  bool ambiguous(const Label& label) const { return !several_.empty() && several_.contains(label); }
  // The blocks of an ambiguous label that an owner has copies of, the oldest first. The tree must
  // know all owners. Costs what it returns; the first time what the label has.
  std::vector<BlockRef> held_in(const Label& label, OwnerId owner, Hold& hold);
  void prefetch(const Label& label) const {
    if (!label.named) ints_.prefetch(label.value);
  }

  uint64_t copies(const Label& label, BlockRef block, OwnerId owner) const;

  // Let others go first while room for further labels like this one is made, if that takes long.
  void make_room(const Label& label, size_t labels, Hold& hold);

  // Count copies of a block; false, and nothing counted, if the budget has no room for it. Must
  // come before the tree learns of the owner.
  bool add(const Label& label, BlockRef block, OwnerId owner, uint64_t count = 1);

  // Likewise for blocks that nobody holds yet; says how many there was room for.
  size_t add_new(const Label* labels, const Stretch& blocks, OwnerId owner);

  // Take one copy away, or all but `left`; true if the owner now no longer holds the block at all:
  // then the tree must learn of it before anything else.
  bool drop(const Label& label, BlockRef block, OwnerId owner,
            std::optional<uint64_t> left = std::nullopt);

  // Take over what another index knew, while there are no labels yet. First all placements, of
  // blocks that may have no owner yet; once the tree knows the owners, the copies of further labels
  // of a block, then those of first ones that `is_plain` does not cover, and `count_shared`.
  void reserve(size_t ints, size_t named) {
    ints_.reserve(ints);
    named_.reserve(named);
  }
  void restore(const Label& label, BlockRef block, uint64_t groups);
  void restore_order(const Label& label, const std::vector<BlockRef>& oldest_first);
  void restore_further(const Label& label, BlockRef block, const std::vector<Copies>& copies);
  void restore_copies(BlockRef block, const std::vector<Copies>& copies);
  void count_shared();
  void restore_counts(uint64_t ambiguous, uint64_t duplicates) {
    ambiguous_ = ambiguous;
    duplicates_ = duplicates;
  }

  // Whether a placement has one copy in each place of the rank that holds the block.
  bool is_plain(const Label& label, BlockRef block) const;
  // The blocks of labels that have several.
  template <class Visit>
  void ambiguities(Visit&& visit) const {
    for (const auto& [label, several] : several_) visit(label, several.blocks);
  }

  // Take all copies of these owners away; the tree learns of it.
  void drop_places(const std::vector<OwnerId>& owners, Hold& hold);

  // Forget every label; the tree learns of it.
  void clear(Hold& hold);

  // Visit each (label, block) pair.
  template <class Visit>
  void placements(Visit&& visit) const;

  // The copies of one placement.
  std::vector<Copies> held(const Label& label, BlockRef block) const;

  // Assert that labels and the tree's owners tell the same; add up each owner's blocks.
  // Throws InvariantError.
  void check(std::vector<uint64_t>& resident) const;

 private:
  struct Placement {
    BlockRef block;
    Label label;
    auto operator<=>(const Placement&) const = default;
  };
  // A block that has, or had, a second label.
  struct Crowd {
    uint64_t labels = 0;
    std::vector<Copies> first;  // of the label that `counted_` does not have, while there is one
  };

  // A label that names several blocks.
  struct Several {
    explicit Several(const Scramble& scramble) : blocks(scramble) {}

    BlockSet blocks;
    // Those that each owner has copies of; made when `held_in` first asks.
    std::vector<std::pair<OwnerId, BlockSet>> held;
    bool sorted_by_owner = false;

    BlockSet& held_by(OwnerId owner, const Scramble& scramble);
  };
  using Ambiguous = std::unordered_map<Label, Several, LabelHash>;

  static uint64_t residence(BlockRef block, OwnerId owner) { return uint64_t{block} << 32 | owner; }
  bool placed(const Label& label, BlockRef block, BlockRef newest) const;
  bool is_held(SetId owners) const;
  uint64_t shown(BlockRef block, OwnerId owner) const;
  std::vector<Copies> shown(BlockRef block) const;
  // The copies of a placement where they are written down.
  const std::vector<Copies>* written(const Label& label, BlockRef block) const;
  std::vector<Copies>* written(const Label& label, BlockRef block) {
    return const_cast<std::vector<Copies>*>(std::as_const(*this).written(label, block));
  }
  Crowd& crowd(BlockRef block);
  bool in_group(const Label& label, BlockRef block, uint32_t group_idx) const;
  uint64_t room() const;
  bool grow();
  // How many resident blocks there are of the prompts that this one is of.
  uint64_t& tally(BlockRef block) {
    const uint64_t prompts = prompts_of(block);
    if (tally_ == nullptr || prompts != tallied_) {
      tallied_ = prompts;
      tally_ = &prompts_[prompts];
    }
    return *tally_;
  }
  uint64_t prompts_of(BlockRef block) const {
    const Strand& strand = tree_.strand(strand_of(block));
    return uint64_t{strand.root} << 1 | (strand.salted ? 1u : 0u);
  }
  void put(const Label& label, BlockRef block);
  void forget(const Label& label, BlockRef block);
  void note_held(const Label& label, BlockRef block, OwnerId owner, bool holds);
  LabelTable& table(const Label& label) { return label.named ? named_ : ints_; }
  const LabelTable& table(const Label& label) const { return label.named ? named_ : ints_; }

  Tree& tree_;
  const Owners& owners_;
  LabelNames& names_;
  Budget& budget_;
  std::vector<OwnerId> places_;
  LabelTable ints_;
  LabelTable named_;
  const Scramble& scramble_;
  Ambiguous several_;
  std::unordered_map<uint64_t, uint64_t> further_;  // by residence: copies beyond the first
  // Trees, as no step of theirs takes long however many there are.
  std::map<BlockRef, Crowd> crowds_;
  std::map<Placement, std::vector<Copies>> counted_;
  std::map<uint64_t, uint64_t> shared_;  // by residence: labels beyond the first
  uint64_t size_ = 0;
  std::unordered_map<uint64_t, uint64_t> prompts_;  // blocks by `prompts_of`, or 0
  uint64_t tallied_ = 0;  // the prompts that `tally` was asked for last, and their blocks
  uint64_t* tally_ = nullptr;
  uint64_t ambiguous_ = 0;
  uint64_t duplicates_ = 0;
};

template <class Visit>
void Labels::placements(Visit&& visit) const {
  for (const bool named : {false, true}) {
    (named ? named_ : ints_).for_each([&](uint64_t value, BlockRef block) {
      visit(Label{value, named}, block);
    });
  }
  for (const auto& [label, several] : several_) {
    const BlockRef last = several.blocks.newest();
    several.blocks.for_each([&](BlockRef block) {
      if (block != last) visit(label, block);
    });
  }
}

}  // namespace kvindex
