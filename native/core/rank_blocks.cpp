#include "core/rank_blocks.hpp"

#include <algorithm>
#include <utility>

#include "core/content_hash.hpp"
#include "core/extra_keys.hpp"

namespace kvindex {

const std::array<const char*, static_cast<size_t>(Counter::kCount)> kCounterNames = {
    "stored",  "reannounced",     "orphaned",        "orphans_attached",  "unplaced",
    "removed", "removed_unknown", "removed_orphans", "removed_ambiguous", "cleared"};

const std::array<const char*, static_cast<size_t>(Ignored::kCount)> kIgnoredNames = {
    "too_many_media",   "block_size",           "token_count",  "extra_keys_count",
    "lookahead_count",  "too_many_groups",      "group_kind",   "partial_block",
    "too_many_block_sizes", "unit_changed",     "position_unknown", "parent_namespace",
    "parent_ambiguous", "max_blocks"};

namespace {

constexpr size_t kMostScratch = 65'536;  // blocks of an event whose scratch is kept for the next

// CPython's hash(()) on 64-bit machines: SGLang 0.4.8-0.5.0 names the root so.
constexpr uint64_t kEmptyTupleHash = 5740354900026072187u;

bool is_root_parent(const Event& event) {
  return !event.has_parent || (!event.parent.is_bytes() && (event.parent.value == 0 ||
                                                            event.parent.value == kEmptyTupleHash));
}

// Whether the engine's labels leave out the prefix, as those of SGLang 0.4.8-0.5.5 do.
bool hashes_content_only(const Batch& batch, const Event& event) {
  if (event.wide_tokens) return event.content_hash;
  const WireHash& first = batch.hashes[event.hashes_begin];
  return !first.is_bytes() &&
         first.value == content_hash(batch.tokens.data() + event.tokens_begin, event.block_size);
}

// Why an event's tokens cannot belong to its hashes; kCount if they can.
Ignored shape_fault(const Event& event) {
  const uint32_t count = event.hashes_count;
  if (event.block_size == 0) return Ignored::block_size;
  if (event.tokens_count % event.block_size != 0 || event.tokens_count / event.block_size < count) {
    return Ignored::token_count;
  }
  if (event.has_extra_keys && event.extras_count != count) return Ignored::extra_keys_count;
  if (event.has_lookahead && count != 0 &&
      (event.lookahead_blocks != count || event.ragged_lookahead)) {
    return Ignored::lookahead_count;
  }
  return Ignored::kCount;
}

Ignored ignored_as(GroupFault fault) {
  switch (fault) {
    case GroupFault::too_many_groups: return Ignored::too_many_groups;
    case GroupFault::group_kind: return Ignored::group_kind;
    case GroupFault::partial_block: return Ignored::partial_block;
    case GroupFault::too_many_block_sizes: return Ignored::too_many_block_sizes;
    case GroupFault::none: break;
  }
  return Ignored::kCount;
}

// The digest of one unit of a block; its extra keys belong to its first one.
Digest unit_digest(const Batch& batch, const Event& event, uint32_t block, uint32_t start,
                   uint32_t unit, std::string_view extra, const KeyMaker& keys) {
  const size_t begin = event.tokens_begin + size_t{block} * event.block_size + start;
  Digest digest = event.wide_tokens ? keys.tokens(batch.wide.data() + begin, unit)
                                    : keys.tokens(batch.tokens.data() + begin, unit);
  if (event.lookahead != 0) {
    const uint64_t* const after =
        batch.wide.data() + event.lookahead_begin + size_t{block} * event.lookahead;
    if (start + unit == event.block_size) {
      digest = keys.with_lookahead(digest, after, event.lookahead);
    } else {  // the block's own tokens come first
      std::vector<uint64_t> covered;
      for (size_t i = begin + unit; covered.size() < event.lookahead; ++i) {
        const size_t beyond = i - event.tokens_begin - size_t{block} * event.block_size;
        covered.push_back(beyond >= event.block_size ? after[beyond - event.block_size]
                          : event.wide_tokens        ? batch.wide[i]
                                                     : batch.tokens[i]);
      }
      digest = keys.with_lookahead(digest, covered.data(), event.lookahead);
    }
  }
  return start == 0 ? keys.with_extra(digest, extra) : digest;
}

std::string_view extra_of(const Batch& batch, const Event& event, uint32_t block) {
  if (!event.has_extra_keys) return {};
  return batch.text(batch.extras[event.extras_begin + block]);
}

// Whether a block has extra keys that belong to some part of it only.
bool has_own_extras(const Batch& batch, const Event& event, uint32_t block) {
  const std::string_view extra = extra_of(batch, event, block);
  return !extra.empty() && !(block == 0 && !event.has_parent && only_texts(extra));
}

}  // namespace

RankBlocks::RankBlocks(Shared& shared, uint32_t slot)
    : shared_(shared), slot_(slot),
      labels_(shared.tree, shared.owners, shared.names, shared.budget, shared.scramble),
      orphans_(shared.tree, shared.names, shared.scramble, shared.max_orphans),
      torn_(0, LabelHash(shared.scramble)) {
  if (shared.summaries.size() <= slot) shared.summaries.resize(slot + 1);
  summarize();
}

void RankBlocks::configure(const CacheSettings& settings) {
  groups_.configure(settings);
  summarize();
}

void RankBlocks::summarize() {
  const RankGroups::Summary& known = groups_.summary();
  shared_.summaries[slot_] = {known.only_group, known.only_size,
                              known.may_skip_holes ? groups_.unit() : 0, known.upper_bound};
}

void RankBlocks::apply(const Batch& batch) {
  for (const ByteRange& tag : batch.skipped) skip(batch.text(tag));
  announced_.reset();
  learn_sizes(batch);
  for (const Event& event : batch.events) {
    switch (event.kind) {
      case EventKind::stored:
        store(batch, event);
        break;
      case EventKind::removed:
        remove(batch, event);
        break;
      case EventKind::cleared:
        count(Counter::cleared, 1);
        drop_all();
        break;
    }
  }
}

void RankBlocks::skip(std::string_view tag) {
  std::string name(tag);
  if (skipped_.size() >= kMostTags && !skipped_.contains(name)) name = "(other)";
  ++skipped_[name];
}

void RankBlocks::clear() {
  drop_all();
  groups_.forget();
  summarize();
  for (const Place& place : places_) shared_.owners.drop(place.owner);
  places_.clear();
  labels_.places().clear();
}

void RankBlocks::drop_all() {
  labels_.clear();
  orphans_.clear();
  positions_unknown_ = false;
  for (const Label& label : torn_) shared_.names.release(label);
  torn_.clear();
}

// Places and labels --------------------------------------------------------------------------

std::optional<OwnerId> RankBlocks::find_place(const Batch& batch, const Event& event) const {
  const std::string_view medium = batch.text(event.medium);
  for (const Place& place : places_) {
    if (place.group_idx == event.group_idx && place.medium == medium) return place.owner;
  }
  return std::nullopt;
}

// The place that an event names, or nothing if there are too many.
std::optional<OwnerId> RankBlocks::place(const Batch& batch, const Event& event) {
  if (const auto known = find_place(batch, event)) return known;
  if (places_.size() >= kMostPlaces) return std::nullopt;
  const std::string* medium = shared_.media.name(batch.text(event.medium));
  if (medium == nullptr) return std::nullopt;
  const OwnerId owner =
      shared_.owners.make({slot_, event.group_idx, medium, medium_tier(*medium)});
  places_.push_back({event.group_idx, *medium, owner});
  labels_.places().push_back(owner);
  return owner;
}

// The label of a hash, acquired: it must be released when the event is done.
Label RankBlocks::label(const Batch& batch, const WireHash& hash) {
  if (!hash.is_bytes()) return {hash.value, false};
  const Label named{shared_.names.number(batch.text(hash)), true};
  shared_.names.acquire(named);
  return named;
}

// Storing ------------------------------------------------------------------------------------

void RankBlocks::store(const Batch& batch, const Event& event) {
  const uint64_t at_least_one = std::max(1u, event.hashes_count);
  const auto owner = place(batch, event);
  if (!owner) {
    ignore(Ignored::too_many_media, at_least_one);
    return;
  }
  gather_labels(batch, event);
  const std::vector<Label>& labels = shared_.labels;
  std::optional<Label> parent;
  if (event.has_parent) parent = label(batch, event.parent);

  if (event.tokens_count == 0) {
    relocate(labels.data(), labels.size(), *owner);
  } else if (const Ignored fault = learn(batch, event); fault != Ignored::kCount) {
    ignore(fault, at_least_one);
  } else if (event.hashes_count != 0) {  // 0: a sparse event of no block
    if (names_only(batch, event)) {
      relocate(labels.data(), labels.size(), *owner);
    } else {
      store_whole(batch, event, *owner, parent ? &*parent : nullptr);
    }
  }
  for (const Label& label : labels) shared_.names.release(label);
  if (parent) shared_.names.release(*parent);
  if (labels.capacity() > kMostScratch) shared_.drop_scratch();
}

// Take the event's labels, and fetch what will be asked about them: it comes while the blocks are
// hashed.
void RankBlocks::gather_labels(const Batch& batch, const Event& event) {
  std::vector<Label>& labels = shared_.labels;
  labels.clear();
  for (uint32_t i = 0; i < event.hashes_count; ++i) {
    labels.push_back(label(batch, batch.hashes[event.hashes_begin + i]));
    labels_.prefetch(labels.back());
  }
}

// Learn the unit from all of a batch first: its groups' sizes come one after the other.
void RankBlocks::learn_sizes(const Batch& batch) {
  const uint32_t unit = groups_.unit();
  for (const Event& event : batch.events) {
    if (event.kind != EventKind::stored || event.tokens_count == 0 || event.block_size == 0 ||
        groups_.knows(event.group_idx, event.block_size, event.lookahead)) {
      continue;
    }
    const bool on_device = medium_tier(batch.text(event.medium)) == 0;
    groups_.learn_size(event.group_idx, event.block_size, on_device);
  }
  if (unit == 0 || groups_.unit() == unit) return;
  // What is held lies in the tree by the old unit, where nothing new would meet it.
  ignore(Ignored::unit_changed, labels_.size());
  drop_all();
}

// Whether only the labels of an event can be used: it does not tell the blocks' contents.
bool RankBlocks::names_only(const Batch& batch, const Event& event) const {
  if (event.tokens_count != uint64_t{event.hashes_count} * event.block_size) return true;
  if (!event.has_extra_keys) return event.has_group && medium_tier(batch.text(event.medium)) != 0;
  if (event.block_size == groups_.unit()) return false;
  for (uint32_t block = 0; block < event.hashes_count; ++block) {
    if (has_own_extras(batch, event, block)) return true;
  }
  return false;
}

void RankBlocks::store_whole(const Batch& batch, const Event& event, OwnerId owner,
                             const Label* parent) {
  const uint32_t unit = groups_.unit();
  std::vector<Digest>& contents = shared_.contents;
  contents.clear();
  for (uint32_t block = 0; block < event.hashes_count; ++block) {
    const std::string_view extra = extra_of(batch, event, block);
    for (uint32_t start = 0; start < event.block_size; start += unit) {
      contents.push_back(unit_digest(batch, event, block, start, unit, extra, shared_.keys));
    }
  }
  const RootId root = shared_.tree.enter(unit, event.lookahead, batch.text(event.lora));
  const std::vector<Label>& labels = shared_.labels;
  store_chain(batch, event,
              {root, labels.data(), contents.data(), labels.size(), event.block_size / unit, owner},
              parent);
  shared_.tree.leave(root);
}

// Check an event's shape and learn its group; kCount if its blocks count.
Ignored RankBlocks::learn(const Batch& batch, const Event& event) {
  const Ignored fault = shape_fault(event);
  if (fault != Ignored::kCount) return fault;
  if (!event.has_kind && groups_.knows(event.group_idx, event.block_size, event.lookahead)) {
    return Ignored::kCount;
  }
  GroupSpec told;
  if (event.has_kind) {
    told.kind = batch.text(event.spec_kind);
    if (event.has_window) told.sliding_window = event.spec_window;
  }
  const GroupFault learned = groups_.learn(event.group_idx, event.has_kind ? &told : nullptr,
                                           event.block_size, event.lookahead);
  summarize();
  return ignored_as(learned);
}

void RankBlocks::store_chain(const Batch& batch, const Event& event, Chain chain,
                             const Label* parent) {
  const BlockRef block = parent == nullptr ? kNoBlock : labels_.newest(*parent);
  if (block != kNoBlock) {
    store_after(block, *parent, chain);
  } else if (is_root_parent(event)) {
    if (!event.has_salt) {
      store_at_root(batch, event, chain);
      return;
    }
    // The salt is part of a prompt's first block only.
    std::vector<Digest> salted(chain.contents, chain.contents + chain.count * chain.scale);
    salted[0] = unit_digest(batch, event, 0, 0, groups_.unit(), batch.text(event.salted_first),
                            shared_.keys);
    chain.contents = salted.data();
    store_at_root(batch, event, chain);
  } else {
    store_detached(batch, event, *parent, chain);
  }
}

void RankBlocks::store_at_root(const Batch& batch, const Event& event, const Chain& chain) {
  if (!event.has_parent && hashes_content_only(batch, event)) {
    // SGLang 0.5.1-0.5.5 names no parent for any node's first page, and its hashes do not tell
    // the position either: to place the page would be a guess.
    positions_unknown_ = true;
    ignore(Ignored::position_unknown, chain.count);
  } else if (is_announced_again(event, chain)) {
    count(Counter::reannounced, chain.count);
  } else {
    place(kNoBlock, chain);
  }
}

// Whether vLLM's report mode "full" announces blocks that a request found cached.
bool RankBlocks::is_announced_again(const Event& event, const Chain& chain) {
  if (!groups_.settings().reports_full || event.has_parent) return false;
  const Label& last = chain.labels[chain.count - 1];
  if (!announced_ || announced_->first != last) {
    announced_ = {last, would_be_found(event, chain)};
  }
  return announced_->second;
}

// Whether the engine's own lookup would have found a chain from the root, group by group.
bool RankBlocks::would_be_found(const Event& event, const Chain& chain) const {
  const std::string* const medium = shared_.owners[chain.owner].medium;
  const uint64_t size = event.block_size;
  for (const auto& [group_idx, group] : groups_.known()) {
    if (!group.spec.takes_part() || group.block_size == 0) continue;
    const auto place = std::find_if(places_.begin(), places_.end(), [&](const Place& some) {
      return some.group_idx == group_idx && some.medium == *medium;
    });
    const uint64_t first = group.spec.needed_from(chain.count * size, group.block_size);
    for (size_t i = 0; i < chain.count; ++i) {
      const uint64_t stop = (i + 1) * size;
      if (stop <= first || stop % group.block_size != 0) continue;
      const BlockRef block = labels_.newest(chain.labels[i]);
      if (place == places_.end() || block == kNoBlock ||
          labels_.copies(chain.labels[i], block, place->owner) == 0) {
        return false;
      }
    }
  }
  return true;
}

bool RankBlocks::is_torn(const Label& label) const {
  return !torn_.empty() && (torn_.contains(label) || torn_.size() >= kMostTorn);
}

void RankBlocks::store_after(BlockRef parent, const Label& parent_label, const Chain& chain) {
  if (shared_.tree.root_of(parent) != chain.root) {
    ignore(Ignored::parent_namespace, chain.count);
  } else if (labels_.ambiguous(parent_label) || is_torn(parent_label)) {
    // One label names several blocks: which of them is meant is not said.
    ignore(Ignored::parent_ambiguous, chain.count);
  } else {
    place(parent, chain);
  }
}

// Store blocks whose parent is not resident: known ones need none, others wait.
void RankBlocks::store_detached(const Batch& batch, const Event& event, const Label& parent,
                                const Chain& chain) {
  if (positions_unknown_ || hashes_content_only(batch, event)) {
    ignore(Ignored::position_unknown, chain.count);
    return;
  }
  const Label* before = &parent;
  for (size_t i = 0; i < chain.count; ++i) {
    const BlockRef block = labels_.newest(chain.labels[i]);
    if (block != kNoBlock && shared_.tree.root_of(block) == chain.root) {
      if (add_copies(chain.labels[i], block, {{chain.owner, 1}})) {
        count(Counter::stored, 1);
        place(block, chain.after(i + 1));
      }
      return;
    }
    if (chain.scale == 1) {
      const uint64_t content_bytes = 8 * (uint64_t{event.block_size} + event.lookahead) +
                                     extra_of(batch, event, static_cast<uint32_t>(i)).size();
      orphans_.hold(chain.labels[i], *before, chain.root, chain.contents[i], content_bytes,
                    chain.owner);
    } else {  // another group's smaller blocks may tell its place
      orphans_.hold_label(chain.labels[i], chain.owner);
    }
    count(Counter::orphaned, 1);
    before = &chain.labels[i];
  }
}

// Note a further place of blocks that an event names without their tokens.
void RankBlocks::relocate(const Label* labels, size_t number, OwnerId owner) {
  for (size_t i = 0; i < number; ++i) {
    const BlockRef block = labels_.newest(labels[i]);
    if (block == kNoBlock) {
      orphans_.hold_label(labels[i], owner);
      count(Counter::unplaced, 1);
    } else if (add_copies(labels[i], block, {{owner, 1}})) {
      count(Counter::stored, 1);
    }
  }
}

// Put a chain of blocks into the tree, then all held blocks that waited for them.
void RankBlocks::place(BlockRef parent, const Chain& chain) {
  if (chain.count == 0) return;
  std::vector<Stretch>& stretches = shared_.chain;
  stretches.clear();
  shared_.tree.extend(parent, chain.root, chain.contents, chain.count * chain.scale, stretches);
  if (chain.scale != 1) return place_scaled(chain);
  const size_t added = add_labels(chain);
  own_chain(added, chain.owner);
  if (added < chain.count) {
    ignore(Ignored::max_blocks, chain.count - added);
    if (!stretches.empty()) {
      const Stretch& last = stretches.back();
      shared_.tree.prune(block_ref(last.strand, last.offset));
    }
  }
  count(Counter::stored, added);
  if (orphans_.size() == 0) return;
  std::vector<std::pair<Label, BlockRef>> placed;
  for (const Stretch& stretch : stretches) {
    for (uint32_t i = 0; i < stretch.count && placed.size() < added; ++i) {
      placed.emplace_back(chain.labels[placed.size()],
                          block_ref(stretch.strand, stretch.offset + i));
    }
  }
  attach(std::move(placed));
}

// The same for blocks of several units: each is the last one of its own.
void RankBlocks::place_scaled(const Chain& chain) {
  std::vector<BlockRef> units;
  for (const Stretch& stretch : shared_.chain) {
    const BlockRef first = block_ref(stretch.strand, stretch.offset);
    for (uint32_t i = 0; i < stretch.count; ++i) units.push_back(first + i);
  }
  std::vector<std::pair<Label, BlockRef>> placed;
  for (size_t i = 0; i < chain.count; ++i) {
    const size_t last = (i + 1) * chain.scale - 1;
    if (last >= units.size() || !add_copy(chain.labels[i], units[last], chain.owner)) break;
    placed.emplace_back(chain.labels[i], units[last]);
  }
  count(Counter::stored, placed.size());
  if (placed.size() < chain.count) {
    ignore(Ignored::max_blocks, chain.count - placed.size());
    if (!units.empty()) shared_.tree.prune(units.back());
  }
  if (orphans_.size() != 0) attach(std::move(placed));
}

// Label the blocks of the extended chain; say how many of them the budget had room for.
size_t RankBlocks::add_labels(const Chain& chain) {
  size_t added = 0;
  for (const Stretch& stretch : shared_.chain) {
    if (shared_.tree.unowned(stretch) && !labels_.written_down()) {  // new ones, as nearly all are
      const size_t some = labels_.add_new(chain.labels + added, stretch);
      added += some;
      if (some < stretch.count) return added;
      continue;
    }
    for (uint32_t i = 0; i < stretch.count; ++i) {
      const BlockRef block = block_ref(stretch.strand, stretch.offset + i);
      if (labels_.crowds(chain.labels[added], block)) {
        own_chain(added, chain.owner);
        labels_.write_down();
      }
      if (!labels_.add(chain.labels[added], block, chain.owner)) return added;
      ++added;
    }
  }
  return added;
}

// Make the first blocks of the extended chain resident.
void RankBlocks::own_chain(size_t blocks, OwnerId owner) {
  for (Stretch stretch : shared_.chain) {
    stretch.count = static_cast<uint32_t>(std::min<size_t>(stretch.count, blocks));
    if (stretch.count == 0) return;
    shared_.tree.own(stretch, owner);
    blocks -= stretch.count;
  }
}

// Give held blocks the place that has become known, and so on down the chain.
void RankBlocks::attach(std::vector<std::pair<Label, BlockRef>> placed) {
  while (!placed.empty()) {
    const auto [label, block] = placed.back();
    placed.pop_back();
    if (const auto held = orphans_.pop(label)) {
      add_copies(label, block, held->copies);
      if (held->parent) shared_.tree.leave(held->root);
    }
    for (const auto& [child_label, orphan] : orphans_.pop_children(label)) {
      const BlockRef child = attach_one(child_label, orphan, block);
      if (child != kNoBlock) placed.emplace_back(child_label, child);
      shared_.tree.leave(orphan.root);
      shared_.names.release(child_label);
    }
  }
}

BlockRef RankBlocks::attach_one(const Label& label, const Orphan& orphan, BlockRef parent) {
  if (orphan.root != shared_.tree.root_of(parent)) {
    ignore(Ignored::parent_namespace, 1);
    return kNoBlock;
  }
  std::vector<Stretch> chain;
  shared_.tree.extend(parent, orphan.root, &orphan.content, 1, chain);
  if (chain.empty()) {
    ignore(Ignored::max_blocks, 1);
    return kNoBlock;
  }
  const BlockRef block = block_ref(chain[0].strand, chain[0].offset);
  if (!add_copies(label, block, orphan.copies)) {
    shared_.tree.prune(block);
    return kNoBlock;
  }
  count(Counter::orphans_attached, 1);
  return block;
}

// Make a block resident in these places as far as there is room; say if it is in any.
bool RankBlocks::add_copies(const Label& label, BlockRef block, const std::vector<Copies>& copies) {
  size_t added = 0;
  for (const Copies& some : copies) {
    if (add_copy(label, block, some.owner, some.count)) {
      ++added;
    } else {
      ignore(Ignored::max_blocks, 1);
    }
  }
  return added != 0;
}

bool RankBlocks::add_copy(const Label& label, BlockRef block, OwnerId owner, uint64_t copies) {
  if (labels_.crowds(label, block)) labels_.write_down();
  if (!labels_.add(label, block, owner, copies)) return false;
  shared_.tree.own({strand_of(block), offset_of(block), 1}, owner);
  return true;
}

// Removing -----------------------------------------------------------------------------------

void RankBlocks::remove(const Batch& batch, const Event& event) {
  const auto owner = find_place(batch, event);
  if (!owner) {
    count(Counter::removed_unknown, event.hashes_count);
    return;
  }
  for (uint32_t i = 0; i < event.hashes_count; ++i) {
    const WireHash& hash = batch.hashes[event.hashes_begin + i];
    if (!hash.is_bytes()) {
      remove_one({hash.value, false}, *owner);
      continue;
    }
    const Label named{shared_.names.find(batch.text(hash)), true};
    if (named.value == LabelNames::kUnknown) {
      count(Counter::removed_unknown, 1);
      continue;
    }
    shared_.names.acquire(named);
    remove_one(named, *owner);
    shared_.names.release(named);
  }
}

void RankBlocks::remove_one(const Label& label, OwnerId owner) {
  std::vector<BlockRef> blocks;
  if (labels_.ambiguous(label)) {
    blocks = labels_.named(label);
  } else if (const BlockRef only = labels_.newest(label); only != kNoBlock) {
    if (labels_.copies(label, only, owner) != 0) {  // as nearly always
      count(Counter::removed, 1);
      if (labels_.drop(label, only, owner)) shared_.tree.disown(only, owner);
      return;
    }
  }
  std::erase_if(blocks, [&](BlockRef block) { return labels_.copies(label, block, owner) == 0; });
  if (blocks.empty()) {
    const bool held = orphans_.drop_copy(label, owner);
    count(held ? Counter::removed_orphans : Counter::removed_unknown, 1);
    return;
  }
  count(Counter::removed, 1);
  // Which of several blocks of one label is gone is not said: none may be answered for.
  if (blocks.size() > 1) {
    count(Counter::removed_ambiguous, blocks.size() - 1);
    if (torn_.size() < kMostTorn && torn_.insert(label).second) shared_.names.acquire(label);
  }
  for (const BlockRef block : blocks) {
    if (labels_.drop(label, block, owner)) shared_.tree.disown(block, owner);
  }
}

}  // namespace kvindex
