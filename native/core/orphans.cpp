#include "core/orphans.hpp"

#include <algorithm>

namespace kvindex {

namespace {

// A publisher chooses its block size: the count alone would be no bound. Counted as if the content
// itself were kept, as the Python twin does, so that both give up the same blocks.
constexpr uint64_t kMostContentBytes = uint64_t{64} << 20;

}  // namespace

void Orphans::hold_label(const Label& label, OwnerId owner) {
  add(label, owner);
  make_room();
}

void Orphans::hold(const Label& label, const Label& parent, RootId root, Digest content,
                   uint64_t content_bytes, OwnerId owner) {
  wait(add(label, owner), label, parent, root, content, content_bytes);
  make_room();
}

void Orphans::wait(Held& held, const Label& label, const Label& parent, RootId root, Digest content,
                   uint64_t content_bytes) {
  Orphan& orphan = held.orphan;
  names_.acquire(parent);
  tree_.enter(root);
  if (orphan.parent) {
    tree_.leave(orphan.root);
    forget_wait(*orphan.parent, held.waiting);
  }
  bytes_ += content_bytes;
  bytes_ -= orphan.content_bytes;
  orphan.parent = parent;
  orphan.root = root;
  orphan.content = content;
  orphan.content_bytes = content_bytes;
  held.waiting = waits_++;
  waiting_[parent].emplace(held.waiting, label);
}

std::optional<Orphan> Orphans::pop(const Label& label) {
  const auto held = held_.find(label);
  if (held == held_.end()) return std::nullopt;
  return take(held, false);
}

std::vector<std::pair<Label, Orphan>> Orphans::pop_children(const Label& parent) {
  std::vector<std::pair<Label, Orphan>> children;
  const auto waiting = waiting_.find(parent);
  if (waiting == waiting_.end()) return children;
  std::vector<Label> labels;
  for (const auto& [number, label] : waiting->second) labels.push_back(label);
  for (const Label& label : labels) children.emplace_back(label, take(held_.find(label), true));
  return children;
}

bool Orphans::drop_copy(const Label& label, OwnerId owner, std::optional<uint64_t> left) {
  const auto held = held_.find(label);
  if (held == held_.end()) return false;
  std::vector<Copies>& all = held->second.orphan.copies;
  const auto copies = std::find_if(all.begin(), all.end(),
                                   [&](const Copies& some) { return some.owner == owner; });
  if (copies == all.end()) return false;
  copies->count = left.value_or(copies->count - 1);
  if (copies->count == 0) all.erase(copies);
  if (all.empty()) {
    if (const Orphan gone = take(held, false); gone.parent) tree_.leave(gone.root);
  }
  return true;
}

void Orphans::drop_places(const std::vector<OwnerId>& owners) {
  for (auto turn = turns_.begin(); turn != turns_.end();) {
    const auto held = held_.find(*turn++);
    std::vector<Copies>& all = held->second.orphan.copies;
    std::erase_if(all, [&](const Copies& some) {
      return std::find(owners.begin(), owners.end(), some.owner) != owners.end();
    });
    if (!all.empty()) continue;
    if (const Orphan gone = take(held, false); gone.parent) tree_.leave(gone.root);
  }
}

void Orphans::clear() {
  for (auto& [label, held] : held_) {
    names_.release(label);
    if (held.orphan.parent) {
      names_.release(*held.orphan.parent);
      tree_.leave(held.orphan.root);
    }
  }
  held_ = HeldMap(0, held_.hash_function());
  turns_.clear();
  waiting_.clear();
  bytes_ = 0;
  forgot_ = false;
}

void Orphans::restore(const Label& label, std::vector<Copies> copies) {
  find_or_make(label).orphan.copies = std::move(copies);
}

void Orphans::restore_wait(const Label& label, const Label& parent, RootId root, Digest content,
                           uint64_t content_bytes) {
  wait(held_.find(label)->second, label, parent, root, content, content_bytes);
}

void Orphans::restore_dropped(uint64_t dropped, bool forgot) {
  dropped_ = dropped;
  forgot_ = forgot;
  make_room();
}

Orphans::Held& Orphans::find_or_make(const Label& label) {
  const auto [place, is_new] = held_.try_emplace(label);
  if (is_new) {
    names_.acquire(label);
    place->second.turn = turns_.insert(turns_.end(), label);
  }
  return place->second;
}

Orphans::Held& Orphans::add(const Label& label, OwnerId owner) {
  Held& held = find_or_make(label);
  for (Copies& copies : held.orphan.copies) {
    if (copies.owner == owner) {
      ++copies.count;
      return held;
    }
  }
  held.orphan.copies.push_back({owner, 1});
  return held;
}

Orphan Orphans::take(HeldMap::iterator held, bool keep_label) {
  const Label label = held->first;
  Orphan orphan = std::move(held->second.orphan);
  bytes_ -= orphan.content_bytes;
  turns_.erase(held->second.turn);
  const uint64_t waiting = held->second.waiting;
  held_.erase(held);
  if (orphan.parent) forget_wait(*orphan.parent, waiting);
  if (!keep_label) names_.release(label);
  return orphan;
}

void Orphans::forget_wait(const Label& parent, uint64_t waiting) {
  const auto siblings = waiting_.find(parent);
  siblings->second.erase(waiting);
  if (siblings->second.empty()) waiting_.erase(siblings);
  names_.release(Label(parent));
}

void Orphans::make_room() {
  while (held_.size() > limit_ || bytes_ > kMostContentBytes) {
    if (const Orphan gone = take(held_.find(turns_.front()), false); gone.parent) {
      tree_.leave(gone.root);
    }
    ++dropped_;
    forgot_ = true;
  }
}

}  // namespace kvindex
