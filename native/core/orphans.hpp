// A rank's stored blocks whose place is not known yet; see kvindex/index/reference/blocks.py, the twin.
//
// An orphan has content and a parent nobody has stored (yet); an unplaced block is only a label at
// a place. Both are bounded and never matched. Owned by the index, under its lock.
#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/label.hpp"
#include "core/labels.hpp"
#include "core/tree.hpp"

namespace kvindex {

struct Orphan {
  std::optional<Label> parent;  // none: unplaced, and what follows means nothing
  RootId root = 0;
  Digest content;
  uint64_t content_bytes = 0;
  std::vector<Copies> copies;
};

class Orphans {
 public:
  Orphans(Tree& tree, LabelNames& names, const Scramble& scramble, size_t limit)
      : tree_(tree), names_(names), limit_(limit), held_(0, LabelHash(scramble)),
        waiting_(0, LabelHash(scramble)) {}

  size_t size() const { return held_.size(); }
  uint64_t dropped() const { return dropped_; }  // given up for newer ones
  bool forgot() const { return forgot_; }        // whether some of these may still be resident

  // Hold one copy of a block of which only the label is known.
  void hold_label(const Label& label, OwnerId owner);

  // Hold one copy of a block that can be placed once its parent is.
  void hold(const Label& label, const Label& parent, RootId root, Digest content,
            uint64_t content_bytes, OwnerId owner);

  // Hold a block no longer, and return it; the caller gets its use of the namespace (`leave`).
  std::optional<Orphan> pop(const Label& label);

  // Hold the children of a block no longer, and return them in the order they came; likewise.
  // Each child's label stays acquired for the caller to release.
  std::vector<std::pair<Label, Orphan>> pop_children(const Label& parent);

  // Take one copy of a held block away, or all but `left`; false if the owner holds none.
  bool drop_copy(const Label& label, OwnerId owner, std::optional<uint64_t> left);

  // Take all copies of these owners away.
  void drop_places(const std::vector<OwnerId>& owners);

  void clear();

  // Visit what is held, the oldest first: its label, itself, and its number among those that wait.
  template <class Visit>
  void for_each(Visit&& visit) const {
    for (const Label& label : turns_) {
      const Held& held = held_.find(label)->second;
      visit(label, held.orphan, held.waiting);
    }
  }

  // Take over what another index held, while nothing is held yet: all of it, the oldest first; then
  // what it waits for, in that order; then how many were given up, and give up what does not fit.
  void restore(const Label& label, std::vector<Copies> copies);
  void restore_wait(const Label& label, const Label& parent, RootId root, Digest content,
                    uint64_t content_bytes);
  void restore_dropped(uint64_t dropped, bool forgot);

 private:
  struct Held {
    Orphan orphan;
    std::list<Label>::iterator turn;
    uint64_t waiting = 0;  // its number among those that wait for the parent
  };
  using HeldMap = std::unordered_map<Label, Held, LabelHash>;

  Held& find_or_make(const Label& label);
  Held& add(const Label& label, OwnerId owner);
  void wait(Held& held, const Label& label, const Label& parent, RootId root, Digest content,
            uint64_t content_bytes);
  Orphan take(HeldMap::iterator held, bool keep_label);
  void forget_wait(const Label& parent, uint64_t waiting);
  void make_room();

  Tree& tree_;
  LabelNames& names_;
  size_t limit_;
  HeldMap held_;
  std::list<Label> turns_;  // the oldest first
  std::unordered_map<Label, std::map<uint64_t, Label>, LabelHash> waiting_;
  uint64_t waits_ = 0;
  uint64_t bytes_ = 0;
  uint64_t dropped_ = 0;
  bool forgot_ = false;
};

}  // namespace kvindex
