// Sparse events leave out blocks, unnamed. Known labels and the engine's hash chain place the others.
#include "core/rank_blocks.hpp"

#include <algorithm>

#include "core/event_digest.hpp"

namespace kvindex {

// Store blocks of a sparse event: it leaves out some, unnamed. A label's place is known if a whole
// event has named it; those that nobody has named lie in a row before the next one that somebody has.
void RankBlocks::store_sparsely(const Event& event, OwnerId owner, Hold& hold) {
  const std::vector<Label>& labels = shared_.scratch.labels;
  size_t first = 0;
  BlockRef before = kNoBlock;  // the last block whose place is known
  for (size_t i = 0; i < labels.size(); ++i) {
    const BlockRef block = labels_.newest(labels[i]);
    if (block == kNoBlock) continue;
    if (first < i) {
      const std::vector<BlockRef> tail = tail_before(event, labels[i], i - first, before);
      for (size_t j = 0; j < tail.size(); ++j) {
        if (!add_copies(labels[first + j], tail[j], {{owner, 1}})) continue;
        count(Counter::stored, 1);
        attach({{labels[first + j], tail[j]}}, hold);
      }
      first += tail.size();
    }
    relocate(labels.data() + first, i + 1 - first, owner, hold);
    first = i + 1;
    before = block;
  }
  relocate(labels.data() + first, labels.size() - first, owner, hold);
}

// Store blocks where the engine's hash chain has their labels; false if that is unsure.
bool RankBlocks::store_proven(const Batch& batch, const Event& event, OwnerId owner, Hold& hold) {
  const uint32_t unit = groups_.unit();
  const size_t scale = event.block_size / unit;
  if (groups_.settings().reports_full || scale > kMostUnits ||
      (counter(Counter::proofs_missed) >= kMostMisses && counter(Counter::proofs) == 0)) {
    return false;
  }
  std::vector<Proofs::Step> steps;
  if (!proofs_.chain(batch, event, unit, steps, hold)) return false;
  std::vector<size_t> places;
  if (!Proofs::find(batch, event, steps, scale, places)) {
    count(Counter::proofs_missed, 1);
    return false;
  }
  for (size_t i = 0; i < steps.size(); ++i) {
    const std::string_view extra = steps[i].salted ? extra_of(batch, event, 0) : std::string_view();
    steps[i].content = unit_digest(batch, event, static_cast<uint32_t>(i / scale),
                                   static_cast<uint32_t>(i % scale) * unit, unit, extra,
                                   shared_.keys);
    hold.did(1 + unit / Hold::kTokens);
  }
  proofs_.keep(steps, unit);
  if (places.empty()) return true;
  count(Counter::proofs, 1);
  const RootId root = shared_.tree.enter(unit, 0, {});
  const bool placed = place_proven(batch, event, root, owner, steps, std::move(places), hold);
  shared_.tree.leave(root);
  return placed;
}

// Place blocks that the chain has proven; false if the blocks before it are not known any more.
bool RankBlocks::place_proven(const Batch& batch, const Event& event, RootId root, OwnerId owner,
                              const std::vector<Proofs::Step>& steps, std::vector<size_t> places,
                              Hold& hold) {
  std::vector<Proofs::Step> before;
  const auto parent = anchor(batch, event, root, before);
  if (!parent) return false;
  if (!event.has_parent) learn_salt({}, extra_of(batch, event, 0));
  std::vector<Digest> contents;
  for (const Proofs::Step& step : before) contents.push_back(step.content);
  for (const Proofs::Step& step : steps) contents.push_back(step.content);
  const size_t scale = event.block_size / groups_.unit();
  for (size_t& start : places) start = before.size() + start * scale;
  const bool salted = *parent == kNoBlock && (before.empty() ? steps : before)[0].salted;
  const std::vector<Label>& labels = shared_.scratch.labels;
  place_sparsely(*parent,
                 {root, labels.data(), contents.data(), labels.size(), scale, owner, salted},
                 places, hold);
  return true;
}

// The last resident block before a proven chain (kNoBlock: its prompt's start), and the steps
// after it.
std::optional<BlockRef> RankBlocks::anchor(const Batch& batch, const Event& event, RootId root,
                                           std::vector<Proofs::Step>& gap) {
  BlockRef found = kNoBlock;
  std::optional<uint64_t> key;
  if (event.has_parent) key = Proofs::key(batch, event.parent);
  while (key) {
    const Proofs::Step* const step = proofs_.look(*key);
    if (step == nullptr) return std::nullopt;
    Label label{*key, false};
    if (event.parent.is_bytes()) label = {shared_.names.find(step->text()), true};
    const bool known = !label.named || label.value != LabelNames::kUnknown;
    const BlockRef block = known ? labels_.newest(label) : kNoBlock;
    if (block != kNoBlock && !labels_.ambiguous(label) && !is_torn(label)) {
      if (shared_.tree.root_of(block) != root) return std::nullopt;
      found = block;
      break;
    }
    gap.push_back(*step);
    key = step->parent;
  }
  std::reverse(gap.begin(), gap.end());
  return found;
}

// Put a chain into the tree of which only blocks that start at these units have labels.
void RankBlocks::place_sparsely(BlockRef parent, const Chain& chain,
                                const std::vector<size_t>& starts, Hold& hold) {
  labels_.make_room(chain.labels[0], chain.count, hold);
  size_t reached = 0;
  for (size_t first = 0; first < starts.size();) {
    const size_t start = starts[first];
    size_t last = first;
    size_t stop = start;
    for (; last < starts.size() && starts[last] == stop; ++last) stop += chain.scale;
    // Blocks without an owner stay where a block after them has one.
    if (reached < start && !place_unnamed(parent, chain, reached, start)) {
      ignore(no_room(), starts.size() - first);
      return;
    }
    parent = place(parent, {chain.root, chain.labels + first, chain.contents + start, last - first,
                            chain.scale, chain.owner, chain.salted}, hold);
    if (parent == kNoBlock) {
      ignore(no_room(), starts.size() - last);
      return;
    }
    first = last;
    reached = stop;
  }
}

// Extend the tree by units that nobody owns yet, and move `last` to the last of them; false, and
// nothing done, if there is no room for all.
bool RankBlocks::place_unnamed(BlockRef& last, const Chain& chain, size_t start, size_t stop) {
  std::vector<Stretch>& stretches = shared_.scratch.chain;
  stretches.clear();
  shared_.tree.extend(last, chain.root, chain.contents + start, stop - start, stretches,
                      chain.salted);
  size_t made = 0;
  for (const Stretch& stretch : stretches) made += stretch.count;
  if (!stretches.empty()) {
    last = block_ref(stretches.back().strand,
                     stretches.back().offset + stretches.back().count - 1);
    if (made < stop - start) shared_.tree.prune(last);
  }
  return made == stop - start;
}

// The places of so many blocks in a row before a label's, or none if unsure.
std::vector<BlockRef> RankBlocks::tail_before(const Event& event, const Label& label, size_t count,
                                              BlockRef before) const {
  const Group& group = groups_.known().at(event.group_idx);
  const uint64_t unit = groups_.unit();
  const uint64_t step = groups_.summary().cache.alignment / unit;
  const uint64_t scale = event.block_size / unit;
  if (!group.spec.has_window() || groups_.summary().kinds_unknown || labels_.ambiguous(label) ||
      step <= count * scale) {
    return {};
  }
  std::vector<BlockRef> places;
  BlockRef block = shared_.tree.before(labels_.newest(label));
  for (uint64_t distance = 1; block != kNoBlock && distance < event.tokens_count / unit;
       ++distance, block = shared_.tree.before(block)) {
    const uint32_t depth = shared_.tree.depth(block);
    if (before != kNoBlock && depth <= shared_.tree.depth(before)) break;
    if (places.size() < count && distance % scale == 0) places.push_back(block);
    if ((depth + 1) % step != 0) continue;
    if (places.size() < count || places.back() == block || !holds(block)) return {};
  }
  if (places.size() != count) return {};
  std::reverse(places.begin(), places.end());
  return places;
}

bool RankBlocks::holds(BlockRef block) const {
  return std::any_of(places_.begin(), places_.end(), [&](const Place& place) {
    return shared_.tree.owned(block, place.owner);
  });
}

}  // namespace kvindex
