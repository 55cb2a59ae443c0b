#include "core/rank_blocks.hpp"

#include <algorithm>
#include <utility>

#include "core/content_hash.hpp"
#include "core/extra_keys.hpp"

namespace kvindex {

const std::array<const char*, static_cast<size_t>(Counter::kCount)> kCounterNames = {
    "stored",  "stored_text", "reannounced", "orphaned", "orphans_attached", "unplaced",
    "removed", "removed_unknown", "removed_orphans", "removed_ambiguous", "cleared",
    "proofs", "proofs_missed"};

const std::array<const char*, static_cast<size_t>(Ignored::kCount)> kIgnoredNames = {
    "too_many_media",   "block_size",           "token_count",  "extra_keys_count",
    "lookahead_count",  "too_many_groups",      "group_kind",   "partial_block",
    "too_many_block_sizes", "unit_changed",     "position_unknown", "parent_namespace",
    "parent_ambiguous", "max_blocks",           "max_blocks_per_rank",
    "too_many_units"};

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
      proofs_(shared.scramble),
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
  RankSummary& summary = shared_.summaries[slot_];
  if (known.main_size != summary.block_size || groups_.unit() != summary.unit ||
      places_missing() != summary.places_missing) {
    shared_.sizes.reset();
  }
  summary = {known.only_group, known.only_size, known.may_skip_holes ? groups_.unit() : 0,
             known.upper_bound, known.main_size, groups_.unit(), places_missing()};
}

void RankBlocks::apply(const Batch& batch, Hold& hold) {
  for (const ByteRange& tag : batch.skipped) skip(batch.text(tag));
  announced_.reset();
  learn_sizes(batch, hold);
  for (const Event& event : batch.events) {
    switch (event.kind) {
      case EventKind::stored:
        store(batch, event, hold);
        break;
      case EventKind::removed:
        announced_.reset();  // what it showed may be gone
        remove(batch, event, hold);
        break;
      case EventKind::cleared:
        announced_.reset();
        count(Counter::cleared, 1);
        drop_cleared(hold);
        break;
    }
    hold.did(1);
  }
  if (places_missing() != shared_.summaries[slot_].places_missing) summarize();
}

void RankBlocks::skip(std::string_view tag) {
  std::string name(tag);
  if (skipped_.size() >= kMostTags && !skipped_.contains(name)) name = "(other)";
  ++skipped_[name];
}

void RankBlocks::clear(Hold& hold) {
  drop_all(hold);
  groups_.forget();
  summarize();
  for (const Place& place : places_) shared_.owners.drop(place.owner);
  places_.clear();
  labels_.places().clear();
}

// Drop what the engine clears: vLLM leaves what lies off the device as it is. A rank whose clears
// cost more than they may loses what lies off the device as well.
void RankBlocks::drop_cleared(Hold& hold) {
  std::vector<OwnerId> gone;
  std::vector<OwnerId> held;
  for (const Place& place : places_) {
    if (outlives_clear(place.medium, groups_.settings().resets_connector)) continue;
    gone.push_back(place.owner);
    if (shared_.tree.held(place.owner) != 0) held.push_back(place.owner);
  }
  const uint64_t looks = labels_.size() * held.size() + orphans_.size();
  if (gone.size() < places_.size() && looks <= clear_looks_) {
    clear_looks_ -= looks;
    orphans_.drop_places(gone);
    labels_.drop_places(held, hold);
    if (labels_.size() != 0 || orphans_.size() != 0) return;
  }
  drop_all(hold);
}

void RankBlocks::drop_all(Hold& hold) {
  labels_.clear(hold);
  orphans_.clear();
  proofs_.clear();
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

void RankBlocks::store(const Batch& batch, const Event& event, Hold& hold) {
  const uint64_t at_least_one = std::max(1u, event.hashes_count);
  clear_looks_ =
      std::min(kClearLooks, clear_looks_ + kClearLooksABlock * uint64_t{event.hashes_count});
  const auto owner = place(batch, event);
  if (!owner) {
    ignore(Ignored::too_many_media, at_least_one);
    return;
  }
  gather_labels(batch, event, hold);
  const std::vector<Label>& labels = shared_.scratch.labels;
  std::optional<Label> parent;
  if (event.has_parent) parent = label(batch, event.parent);

  if (event.tokens_count == 0) {
    relocate(labels.data(), labels.size(), *owner, hold);
  } else if (const Ignored fault = learn(batch, event); fault != Ignored::kCount) {
    ignore(fault, at_least_one);
  } else if (!(groups_.summary().windows_only && store_proven(batch, event, *owner, hold)) &&
             event.hashes_count != 0) {  // 0: a sparse event of no block
    if (event.tokens_count != uint64_t{event.hashes_count} * event.block_size) {
      store_sparsely(event, *owner, hold);
    } else if (names_only(batch, event)) {
      relocate(labels.data(), labels.size(), *owner, hold);
    } else if (event.block_size / groups_.unit() > kMostUnits) {
      ignore(Ignored::too_many_units, event.hashes_count);
    } else {
      store_whole(batch, event, *owner, parent ? &*parent : nullptr, hold);
    }
  }
  for (const Label& label : labels) shared_.names.release(label);
  if (parent) shared_.names.release(*parent);
  if (labels.capacity() > kMostScratch) shared_.drop_scratch();
}

// Take the event's labels, and fetch what will be asked about them: it comes while the blocks are
// hashed.
void RankBlocks::gather_labels(const Batch& batch, const Event& event, Hold& hold) {
  std::vector<Label>& labels = shared_.scratch.labels;
  labels.clear();
  for (uint32_t i = 0; i < event.hashes_count; ++i) {
    labels.push_back(label(batch, batch.hashes[event.hashes_begin + i]));
    labels_.prefetch(labels.back());
    if (i % Hold::kBlocks == Hold::kBlocks - 1) hold.did(Hold::kBlocks);
  }
}

// Learn the unit from all of a batch first: its groups' sizes come one after the other.
void RankBlocks::learn_sizes(const Batch& batch, Hold& hold) {
  const uint32_t unit = groups_.unit();
  for (const Event& event : batch.events) {
    if (event.kind != EventKind::stored || event.tokens_count == 0 || event.block_size == 0 ||
        groups_.knows(event.group_idx, event.block_size, event.lookahead)) {
      continue;
    }
    const bool on_device = medium_tier(batch.text(event.medium)) == 0;
    groups_.learn_size(event.group_idx, event.block_size, on_device);
    summarize();
  }
  if (unit == 0 || groups_.unit() == unit) return;
  // What is held lies in the tree by the old unit, where nothing new would meet it.
  ignore(Ignored::unit_changed, labels_.size());
  drop_all(hold);
}

// Whether only the labels of an event can be used: it does not tell the blocks' contents.
bool RankBlocks::names_only(const Batch& batch, const Event& event) const {
  if (!event.has_extra_keys) return event.has_group && medium_tier(batch.text(event.medium)) != 0;
  if (event.block_size == groups_.unit()) return false;
  for (uint32_t block = 0; block < event.hashes_count; ++block) {
    if (has_own_extras(batch, event, block)) return true;
  }
  return false;
}

void RankBlocks::store_whole(const Batch& batch, const Event& event, OwnerId owner,
                             const Label* parent, Hold& hold) {
  if (holds_text(batch, event)) count(Counter::stored_text, event.hashes_count);
  const uint32_t unit = groups_.unit();
  std::vector<Digest>& contents = shared_.scratch.contents;
  contents.clear();
  for (uint32_t block = 0; block < event.hashes_count; ++block) {
    const std::string_view extra = extra_of(batch, event, block);
    for (uint32_t start = 0; start < event.block_size; start += unit) {
      contents.push_back(unit_digest(batch, event, block, start, unit, extra, shared_.keys));
    }
    hold.did(event.block_size / unit + event.block_size / Hold::kTokens);
  }
  const RootId root = shared_.tree.enter(unit, event.lookahead, batch.text(event.lora));
  const std::vector<Label>& labels = shared_.scratch.labels;
  store_chain(batch, event,
              {root, labels.data(), contents.data(), labels.size(), event.block_size / unit, owner},
              parent, hold);
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
                             const Label* parent, Hold& hold) {
  const BlockRef block = parent == nullptr ? kNoBlock : labels_.newest(*parent);
  if (block != kNoBlock) {
    store_after(block, *parent, chain, hold);
  } else if (is_root_parent(event)) {
    const std::string_view extra =
        event.has_salt ? batch.text(event.salted_first) : extra_of(batch, event, 0);
    chain.salted = learn_salt(batch.text(event.lora), extra);
    if (!event.has_salt) {
      store_at_root(batch, event, chain, hold);
      return;
    }
    // The salt is part of a prompt's first block only.
    std::vector<Digest> salted(chain.contents, chain.contents + chain.count * chain.scale);
    salted[0] = unit_digest(batch, event, 0, 0, groups_.unit(), extra,
                            shared_.keys);
    chain.contents = salted.data();
    store_at_root(batch, event, chain, hold);
  } else {
    store_detached(batch, event, *parent, chain, hold);
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

void RankBlocks::store_at_root(const Batch& batch, const Event& event, const Chain& chain,
                               Hold& hold) {
  if (!event.has_parent && hashes_content_only(batch, event)) {
    // SGLang 0.5.1-0.5.5 names no parent for any node's first page, and its hashes do not tell
    // the position either: to place the page would be a guess.
    positions_unknown_ = true;
    ignore(Ignored::position_unknown, chain.count);
  } else if (is_announced_again(event, chain, hold)) {
    count(Counter::reannounced, chain.count);
  } else {
    place(kNoBlock, chain, hold);
  }
}

// Whether vLLM's report mode "full" announces blocks that a request found cached.
bool RankBlocks::is_announced_again(const Event& event, const Chain& chain, Hold& hold) {
  if (!groups_.settings().reports_full || event.has_parent) return false;
  const Label& last = chain.labels[chain.count - 1];
  if (!announced_ || announced_->first != last) {
    announced_ = {last, would_be_found(event, chain, hold)};
  }
  return announced_->second;
}

// Whether the engine's own lookup would have found a chain from the root, group by group.
bool RankBlocks::would_be_found(const Event& event, const Chain& chain, Hold& hold) const {
  const std::string* const medium = shared_.owners[chain.owner].medium;
  const uint64_t size = event.block_size;
  for (const auto& [group_idx, group] : groups_.known()) {
    if (!group.spec.takes_part() || group.block_size == 0) continue;
    const auto place = std::find_if(places_.begin(), places_.end(), [&](const Place& some) {
      return some.group_idx == group_idx && some.medium == *medium;
    });
    const uint64_t first = group.spec.needed_from(chain.count * size, group.block_size);
    for (size_t i = 0; i < chain.count; ++i) {
      if (i % Hold::kBlocks == Hold::kBlocks - 1) hold.did(Hold::kBlocks);
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

void RankBlocks::store_after(BlockRef parent, const Label& parent_label, const Chain& chain,
                             Hold& hold) {
  if (shared_.tree.root_of(parent) != chain.root) {
    ignore(Ignored::parent_namespace, chain.count);
  } else if (labels_.ambiguous(parent_label) || is_torn(parent_label)) {
    // One label names several blocks: which of them is meant is not said.
    ignore(Ignored::parent_ambiguous, chain.count);
  } else {
    place(parent, chain, hold);
  }
}

// Store blocks whose parent is not resident: known ones need none, others wait.
void RankBlocks::store_detached(const Batch& batch, const Event& event, const Label& parent,
                                const Chain& chain, Hold& hold) {
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
        place(block, chain.after(i + 1), hold);
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
    hold.did(1);
  }
}

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
  if (!group.spec.has_window() || groups_.summary().kinds_untold || labels_.ambiguous(label) ||
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

// Note a further place of blocks that an event names without their tokens.
void RankBlocks::relocate(const Label* labels, size_t number, OwnerId owner, Hold& hold) {
  for (size_t i = 0; i < number; ++i) {
    const BlockRef block = labels_.newest(labels[i]);
    if (block == kNoBlock) {
      orphans_.hold_label(labels[i], owner);
      count(Counter::unplaced, 1);
    } else if (add_copies(labels[i], block, {{owner, 1}})) {
      count(Counter::stored, 1);
    }
    hold.did(1);
  }
}

// Put a chain of blocks into the tree, cut by cut, and after each all held blocks that waited for
// it. The last block of a cut stays while others go first: this rank holds it. Return the last of
// all, or kNoBlock if there was no room for all.
BlockRef RankBlocks::place(BlockRef parent, Chain chain, Hold& hold) {
  const bool is_short = chain.count * chain.scale <= Hold::kBlocks;
  const size_t most = is_short ? chain.count : std::max<size_t>(1, Hold::kBlocks / chain.scale);
  while (chain.count != 0) {
    const Chain cut = chain.first(most);
    labels_.make_room(cut.labels[0], cut.count, hold);
    const size_t added = place_some(parent, cut, hold);
    if (added < cut.count) {
      ignore(no_room(), chain.count - added);
      return kNoBlock;
    }
    hold.did(cut.count * cut.scale);
    chain = chain.after(cut.count);
  }
  return parent;
}

// Place as many blocks as there is room for; say how many, and move `last` to the last of all.
size_t RankBlocks::place_some(BlockRef& last, const Chain& chain, Hold& hold) {
  std::vector<Stretch>& stretches = shared_.scratch.chain;
  stretches.clear();
  shared_.tree.extend(last, chain.root, chain.contents, chain.count * chain.scale, stretches,
                      chain.salted);
  if (chain.scale != 1) return place_scaled(last, chain, hold);
  const size_t added = add_labels(chain);
  own_chain(added, chain.owner);
  if (!stretches.empty()) {
    const Stretch& end = stretches.back();
    last = block_ref(end.strand, end.offset + end.count - 1);
    if (added < chain.count) shared_.tree.prune(last);
  }
  count(Counter::stored, added);
  if (orphans_.size() == 0) return added;
  std::vector<std::pair<Label, BlockRef>> placed;
  for (const Stretch& stretch : stretches) {
    for (uint32_t i = 0; i < stretch.count && placed.size() < added; ++i) {
      placed.emplace_back(chain.labels[placed.size()],
                          block_ref(stretch.strand, stretch.offset + i));
    }
  }
  attach(std::move(placed), hold);
  return added;
}

// The same for blocks of several units: each is the last one of its own.
size_t RankBlocks::place_scaled(BlockRef& last, const Chain& chain, Hold& hold) {
  std::vector<BlockRef> units;
  for (const Stretch& stretch : shared_.scratch.chain) {
    const BlockRef first = block_ref(stretch.strand, stretch.offset);
    for (uint32_t i = 0; i < stretch.count; ++i) units.push_back(first + i);
  }
  std::vector<std::pair<Label, BlockRef>> placed;
  for (size_t i = 0; i < chain.count; ++i) {
    const size_t end = (i + 1) * chain.scale - 1;
    if (end >= units.size() || !add_copy(chain.labels[i], units[end], chain.owner)) break;
    placed.emplace_back(chain.labels[i], units[end]);
  }
  const size_t added = placed.size();
  count(Counter::stored, added);
  if (!units.empty()) {
    last = units.back();
    if (added < chain.count) shared_.tree.prune(last);
  }
  if (orphans_.size() != 0) attach(std::move(placed), hold);
  return added;
}

// Label the blocks of the extended chain; say how many of them the budget had room for.
size_t RankBlocks::add_labels(const Chain& chain) {
  size_t added = 0;
  for (const Stretch& stretch : shared_.scratch.chain) {
    if (shared_.tree.unowned(stretch)) {  // new ones, as nearly all are
      const size_t some = labels_.add_new(chain.labels + added, stretch, chain.owner);
      added += some;
      if (some < stretch.count) return added;
      continue;
    }
    for (uint32_t i = 0; i < stretch.count; ++i) {
      const BlockRef block = block_ref(stretch.strand, stretch.offset + i);
      if (!labels_.add(chain.labels[added], block, chain.owner)) return added;
      ++added;
    }
  }
  return added;
}

// Make the first blocks of the extended chain resident.
void RankBlocks::own_chain(size_t blocks, OwnerId owner) {
  for (Stretch stretch : shared_.scratch.chain) {
    stretch.count = static_cast<uint32_t>(std::min<size_t>(stretch.count, blocks));
    if (stretch.count == 0) return;
    shared_.tree.own(stretch, owner);
    blocks -= stretch.count;
  }
}

// Give held blocks the place that has become known, and so on down the chain.
void RankBlocks::attach(std::vector<std::pair<Label, BlockRef>> placed, Hold& hold) {
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
    hold.did(1);
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
      ignore(no_room(), 1);
    }
  }
  return added != 0;
}

bool RankBlocks::add_copy(const Label& label, BlockRef block, OwnerId owner, uint64_t copies) {
  if (!labels_.add(label, block, owner, copies)) return false;
  shared_.tree.own({strand_of(block), offset_of(block), 1}, owner);
  return true;
}

// Removing -----------------------------------------------------------------------------------

void RankBlocks::remove(const Batch& batch, const Event& event, Hold& hold) {
  const auto owner = find_place(batch, event);
  if (!owner) {
    count(Counter::removed_unknown, event.hashes_count);
    return;
  }
  for (uint32_t i = 0; i < event.hashes_count; ++i) {
    const WireHash& hash = batch.hashes[event.hashes_begin + i];
    hold.did(1);
    if (!hash.is_bytes()) {
      remove_one({hash.value, false}, *owner, hold);
      continue;
    }
    const Label named{shared_.names.find(batch.text(hash)), true};
    if (named.value == LabelNames::kUnknown) {
      count(Counter::removed_unknown, 1);
      continue;
    }
    shared_.names.acquire(named);
    remove_one(named, *owner, hold);
    shared_.names.release(named);
  }
}

void RankBlocks::remove_one(const Label& label, OwnerId owner, Hold& hold) {
  if (labels_.ambiguous(label)) {
    const std::vector<BlockRef> blocks = labels_.held_in(label, owner, hold);
    if (!blocks.empty()) return remove_several(label, blocks, owner, hold);
  } else if (const BlockRef only = labels_.newest(label); only != kNoBlock) {
    if (labels_.copies(label, only, owner) != 0) {  // as nearly always
      count(Counter::removed, 1);
      if (labels_.drop(label, only, owner)) shared_.tree.disown(only, owner);
      return;
    }
  }
  const bool held = orphans_.drop_copy(label, owner);
  count(held ? Counter::removed_orphans : Counter::removed_unknown, 1);
}

// Which of several blocks of one label is gone is not said: none may be answered for.
void RankBlocks::remove_several(const Label& label, const std::vector<BlockRef>& blocks,
                                OwnerId owner, Hold& hold) {
  count(Counter::removed, 1);
  if (blocks.size() > 1) {
    count(Counter::removed_ambiguous, blocks.size() - 1);
    if (torn_.size() < kMostTorn && torn_.insert(label).second) shared_.names.acquire(label);
  }
  for (const BlockRef block : blocks) {
    if (labels_.drop(label, block, owner)) shared_.tree.disown(block, owner);
    hold.did(1);
  }
}

}  // namespace kvindex
