#include "core/rank_blocks.hpp"

#include <algorithm>
#include <utility>

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

// As `kvindex.wire.quirks.HARMLESS_TAGS`.
bool is_harmless(std::string_view tag) { return tag == "BlockInactive"; }

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
  const bool chunks = has_chunks();
  summary = {known.only_group, chunks ? 0 : known.only_size,
             known.may_skip_holes || chunks ? groups_.unit() : 0,
             upper_bound(), known.main_size, groups_.unit(), places_missing()};
}

// Whether a label may stand for more than the block that it names, or for less.
bool RankBlocks::has_chunks() const {
  return groups_.summary().cache.offload_chunk != 0 ||
         std::any_of(places_.begin(), places_.end(), [&](const Place& place) {
           return groups_.units_in(place.chunk) > 1;
         });
}

void RankBlocks::apply(const Batch& batch, Hold& hold) {
  announced_.reset();
  learn_sizes(batch, hold);
  if (early_ != nullptr && !early_->keep(batch)) early_.reset();
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
  for (const ByteRange& tag : batch.skipped) skip(batch.text(tag));
  const RankSummary& shown = shared_.summaries[slot_];
  if (places_missing() != shown.places_missing || upper_bound() != shown.upper_bound) summarize();
}

void RankBlocks::skip(std::string_view tag) {
  std::string name(tag);
  auto& skipped = counts_.skipped;
  if (skipped.size() >= kMostTags && !skipped.contains(name)) name = "(other)";
  ++skipped[name];
  // It may have removed what is held, wherever it stood in the batch.
  if (!is_harmless(tag) && (labels_.size() != 0 || orphans_.size() != 0)) removals_unknown_ = true;
}

void RankBlocks::clear(Hold& hold) {
  drop_all(hold);
  groups_.forget();
  drop_places();
  early_ = std::make_unique<Early>(counts_);
  summarize();
}

void RankBlocks::drop_places() {
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
  positions_unknown_ = left_out_ = removals_unknown_ = false;
  for (const Label& label : torn_) shared_.names.release(label);
  torn_.clear();
  salts_.clear();
}

// Places and labels --------------------------------------------------------------------------

// The place of what an event stores, or nothing if there are too many.
std::optional<OwnerId> RankBlocks::place(const Batch& batch, const Event& event) {
  const std::string_view name = batch.text(event.medium);
  const uint8_t tier = medium_tier(name);
  const uint32_t chunk = groups_.chunk_of(event.group_idx, event.block_size, tier);
  for (const Place& place : places_) {
    if (place.group_idx == event.group_idx && place.chunk == chunk && place.medium == name) {
      return place.owner;
    }
  }
  if (places_.size() >= kMostPlaces) return std::nullopt;
  const std::string* medium = shared_.media.name(name);
  if (medium == nullptr) return std::nullopt;
  const OwnerId owner = shared_.owners.make({slot_, event.group_idx, medium, tier, chunk});
  places_.push_back({event.group_idx, *medium, chunk, owner});
  labels_.places().push_back(owner);
  if (chunk != 0) summarize();
  return owner;
}

// The label of a hash, acquired: it must be released when the event is done.
Label RankBlocks::label(const Batch& batch, const WireHash& hash) {
  if (!hash.is_bytes()) return {hash.value, false};
  const Label named{shared_.names.number(batch.text(hash)), true};
  shared_.names.acquire(named);
  return named;
}

// Removing -----------------------------------------------------------------------------------

void RankBlocks::remove(const Batch& batch, const Event& event, Hold& hold) {
  const std::string_view medium = batch.text(event.medium);
  Few<OwnerId> owners;  // of blocks, and of chunks of each size: a removal does not show whose
  for (const Place& place : places_) {
    if (place.group_idx == event.group_idx && place.medium == medium) owners.push_back(place.owner);
  }
  if (owners.empty()) {
    count(Counter::removed_unknown, event.hashes_count);
    return;
  }
  Left left;  // an engine that reports only the removal of the last copy leaves none
  if (groups_.settings().removes_last) left = 0;
  for (uint32_t i = 0; i < event.hashes_count; ++i) {
    const WireHash& hash = batch.hashes[event.hashes_begin + i];
    if (event.has_copies_left) left = batch.tokens[event.copies_left_begin + i];
    hold.did(1);
    if (!hash.is_bytes()) {
      remove_one({hash.value, false}, owners, left, hold);
      continue;
    }
    const Label named{shared_.names.find(batch.text(hash)), true};
    if (named.value == LabelNames::kUnknown) {
      count(Counter::removed_unknown, 1);
      continue;
    }
    shared_.names.acquire(named);
    remove_one(named, owners, left, hold);
    shared_.names.release(named);
  }
}

void RankBlocks::remove_one(const Label& label, const Few<OwnerId>& owners, Left left,
                            Hold& hold) {
  if (owners.size() == 1 && !labels_.ambiguous(label)) {  // as nearly always
    const OwnerId owner = *owners.begin();
    const BlockRef only = labels_.newest(label);
    if (only != kNoBlock && labels_.copies(label, only, owner) != 0) {
      count(Counter::removed, 1);
      if (labels_.drop(label, only, owner, left)) shared_.tree.disown(only, owner);
      return;
    }
  } else if (const Held held = held_in(label, owners, hold); !held.empty()) {
    return remove_several(label, held, left, hold);
  }
  bool waited = false;
  for (const OwnerId owner : owners) waited |= orphans_.drop_copy(label, owner, left);
  count(waited ? Counter::removed_orphans : Counter::removed_unknown, 1);
}

// The blocks of a label that these owners have copies of.
RankBlocks::Held RankBlocks::held_in(const Label& label, const Few<OwnerId>& owners, Hold& hold) {
  Held held;
  for (const OwnerId owner : owners) {
    if (labels_.ambiguous(label)) {
      for (const BlockRef block : labels_.held_in(label, owner, hold)) {
        held.emplace_back(owner, block);
      }
    } else if (const BlockRef only = labels_.newest(label);
               only != kNoBlock && labels_.copies(label, only, owner) != 0) {
      held.emplace_back(owner, only);
    }
  }
  return held;
}

// Which of several blocks of one label is gone is not said, unless all are: none may be answered
// for.
void RankBlocks::remove_several(const Label& label, const Held& held, Left left, Hold& hold) {
  count(Counter::removed, 1);
  if (held.size() > 1 && left != 0) {
    left.reset();
    count(Counter::removed_ambiguous, held.size() - 1);
    const bool is_torn = std::any_of(held.begin(), held.end(), [&](const auto& some) {
      return some.second != held.front().second;
    });
    if (is_torn && torn_.size() < kMostTorn && torn_.insert(label).second) {
      shared_.names.acquire(label);
    }
  }
  for (const auto& [owner, block] : held) {
    if (labels_.drop(label, block, owner, left)) shared_.tree.disown(block, owner);
    hold.did(1);
  }
}

}  // namespace kvindex
