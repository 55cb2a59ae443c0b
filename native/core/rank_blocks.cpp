#include "core/rank_blocks.hpp"

#include <algorithm>
#include <utility>

#include "core/content_hash.hpp"

namespace kvindex {

const std::array<const char*, static_cast<size_t>(Counter::kCount)> kCounterNames = {
    "stored",  "stored_text", "reannounced", "orphaned", "orphans_attached", "unplaced",
    "removed", "removed_unknown", "removed_orphans", "removed_ambiguous", "cleared"};

const std::array<const char*, static_cast<size_t>(Ignored::kCount)> kIgnoredNames = {
    "too_many_media",   "no_blocks",        "block_size",       "token_count",
    "extra_keys_count", "lookahead_count",  "too_many_groups",  "group_kind",
    "partial_block",    "too_many_block_sizes", "position_unknown", "parent_namespace",
    "parent_ambiguous", "max_blocks"};

namespace {

constexpr size_t kMostScratch = 65'536;  // blocks of an event whose scratch is kept for the next

// CPython's hash(()) on 64-bit machines: SGLang 0.4.8-0.5.0 names the root so.
constexpr uint64_t kEmptyTupleHash = 5740354900026072187u;

bool is_root_parent(const Event& event) {
  return !event.has_parent || (!event.parent.is_bytes() && (event.parent.value == 0 ||
                                                            event.parent.value == kEmptyTupleHash));
}

// Whether there is text among an event's tokens: decoding has made it ints that no vocabulary has
// (kvindex.wire.text_token).
bool holds_text(const Batch& batch, const Event& event) {
  if (!event.wide_tokens) return false;
  const auto* const begin = batch.wide.data() + event.tokens_begin;
  return std::any_of(begin, begin + event.tokens_count,
                     [](uint64_t token) { return token >> 62 == 1; });
}

// Whether the engine's labels leave out the prefix, as those of SGLang 0.4.8-0.5.5 do.
bool hashes_content_only(const Batch& batch, const Event& event) {
  if (event.wide_tokens) return event.content_hash;
  const WireHash& first = batch.hashes[event.hashes_begin];
  return !first.is_bytes() &&
         first.value == content_hash(batch.tokens.data() + event.tokens_begin, event.block_size);
}

// Why an event's tokens cannot be mapped to its hashes; kCount if they can.
Ignored shape_fault(const Event& event) {
  const uint32_t count = event.hashes_count;
  if (count == 0) return Ignored::no_blocks;
  if (event.block_size == 0) return Ignored::block_size;
  if (event.tokens_count != uint64_t{count} * event.block_size) return Ignored::token_count;
  if (event.has_extra_keys && event.extras_count != count) return Ignored::extra_keys_count;
  if (event.has_lookahead && (event.lookahead_blocks != count || event.ragged_lookahead)) {
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

Digest block_digest(const Batch& batch, const Event& event, uint32_t block, std::string_view extra,
                    const KeyMaker& keys) {
  const size_t begin = event.tokens_begin + size_t{block} * event.block_size;
  Digest digest = event.wide_tokens ? keys.tokens(batch.wide.data() + begin, event.block_size)
                                    : keys.tokens(batch.tokens.data() + begin, event.block_size);
  if (event.lookahead != 0) {
    const size_t after = event.lookahead_begin + size_t{block} * event.lookahead;
    digest = keys.with_lookahead(digest, batch.wide.data() + after, event.lookahead);
  }
  return keys.with_extra(digest, extra);
}

std::string_view extra_of(const Batch& batch, const Event& event, uint32_t block) {
  if (!event.has_extra_keys) return {};
  return batch.text(batch.extras[event.extras_begin + block]);
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

void RankBlocks::configure(const std::map<uint32_t, GroupSpec>& specs) {
  groups_.configure(specs);
  summarize();
}

void RankBlocks::summarize() {
  RankSummary& summary = shared_.summaries[slot_];
  const auto main = groups_.main();
  const uint32_t block_size = main ? main->second->block_size : 0;
  if (block_size != summary.block_size) shared_.sizes.reset();
  summary = {groups_.only_full(), !groups_.window_only().empty(), block_size};
}

void RankBlocks::apply(const Batch& batch) {
  for (const ByteRange& tag : batch.skipped) skip(batch.text(tag));
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
  reports_full_ = false;
  positions_unknown_ = false;
  for (const Label& label : torn_) shared_.names.release(label);
  torn_.clear();
  salts_.clear();
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
  const OwnerId owner = shared_.owners.make({slot_, event.group_idx, medium});
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
  } else {
    if (holds_text(batch, event)) count(Counter::stored_text, event.hashes_count);
    std::vector<Digest>& contents = shared_.contents;
    contents.clear();
    for (uint32_t block = 0; block < event.hashes_count; ++block) {
      contents.push_back(
          block_digest(batch, event, block, extra_of(batch, event, block), shared_.keys));
    }
    const RootId root =
        shared_.tree.enter(event.block_size, event.lookahead, batch.text(event.lora));
    store_chain(batch, event, {root, labels.data(), contents.data(), labels.size(), *owner},
                parent ? &*parent : nullptr);
    shared_.tree.leave(root);
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
    const std::string_view extra =
        event.has_salt ? batch.text(event.salted_first) : extra_of(batch, event, 0);
    chain.salted = learn_salt(batch.text(event.lora), extra);
    if (!event.has_salt) {
      store_at_root(batch, event, chain);
      return;
    }
    // The salt is part of a prompt's first block only.
    std::vector<Digest> salted(chain.contents, chain.contents + chain.count);
    salted[0] = block_digest(batch, event, 0, extra, shared_.keys);
    chain.contents = salted.data();
    store_at_root(batch, event, chain);
  } else {
    store_detached(batch, event, *parent, chain);
  }
}

// Remember under which extra keys prompts start; say if these have some.
bool RankBlocks::learn_salt(std::string_view lora, std::string_view extra) {
  if (extra.empty() || extra.size() > kMostSaltBytes) return !extra.empty();
  const auto known = std::find_if(salts_.begin(), salts_.end(), [&](const Salt& salt) {
    return salt.first == lora && salt.second == extra;
  });
  if (known != salts_.end()) {
    std::rotate(known, known + 1, salts_.end());
    return true;
  }
  if (salts_.size() == kMostSalts) salts_.erase(salts_.begin());
  salts_.emplace_back(lora, extra);
  return true;
}

void RankBlocks::store_at_root(const Batch& batch, const Event& event, const Chain& chain) {
  if (!event.has_parent && hashes_content_only(batch, event)) {
    // SGLang 0.5.1-0.5.5 names no parent for any node's first page, and its hashes do not tell
    // the position either: to place the page would be a guess.
    positions_unknown_ = true;
    ignore(Ignored::position_unknown, chain.count);
  } else if (is_reannouncement(chain)) {
    count(Counter::reannounced, chain.count);
  } else {
    place(kNoBlock, chain);
  }
}

// Whether vLLM's report mode "full" tells again what is counted already. A prompt's single first
// block may also be a further physical copy; it is taken for one until the rank has shown by a
// longer store that it re-announces.
bool RankBlocks::is_reannouncement(const Chain& chain) {
  for (size_t i = 0; i < chain.count; ++i) {
    const BlockRef block = labels_.newest(chain.labels[i]);
    if (block == kNoBlock || labels_.copies(chain.labels[i], block, chain.owner) == 0) return false;
  }
  reports_full_ = reports_full_ || chain.count > 1;
  return reports_full_;
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
    const uint64_t content_bytes = 8 * (uint64_t{event.block_size} + event.lookahead) +
                                   extra_of(batch, event, static_cast<uint32_t>(i)).size();
    orphans_.hold(chain.labels[i], *before, chain.root, chain.contents[i], content_bytes,
                  chain.owner);
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
  shared_.tree.extend(parent, chain.root, chain.contents, chain.count, stretches, chain.salted);
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
    if (labels_.crowds(label, block)) labels_.write_down();
    if (labels_.add(label, block, some.owner, some.count)) {
      shared_.tree.own({strand_of(block), offset_of(block), 1}, some.owner);
      ++added;
    } else {
      ignore(Ignored::max_blocks, 1);
    }
  }
  return added != 0;
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
