// A stored event: its shape, its group, and the place of its blocks, after their parent or at the root.
#include "core/rank_blocks.hpp"

#include <algorithm>

#include "core/content_hash.hpp"
#include "core/event_digest.hpp"
#include "core/extra_keys.hpp"

namespace kvindex {

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

// Whether a block has extra keys that belong to some part of it only.
bool has_own_extras(const Batch& batch, const Event& event, uint32_t block) {
  const std::string_view extra = extra_of(batch, event, block);
  return !extra.empty() && !(block == 0 && !event.has_parent && only_texts(extra));
}

}  // namespace

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
  const bool changed = unit != 0 && groups_.unit() != unit;
  if (early_ != nullptr) {
    auto early = std::move(early_);
    const bool is_known = groups_.knows_device_size();
    if (!early->batches.empty() && (is_known || changed)) apply_again(*early, hold);
    if (!is_known) early_ = std::move(early);
    return;
  }
  if (!changed) return;
  // What is held lies in the tree by the old unit, where nothing new would meet it.
  const size_t dropped = labels_.size();
  drop_all(hold);
  ignore(Ignored::unit_changed, dropped);
}

void RankBlocks::apply_again(const Early& early, Hold& hold) {
  drop_all(hold);
  drop_places();
  counts_ = early.before;
  for (const Batch& batch : early.batches) apply(batch, hold);
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
  GroupSpec reported;
  if (event.has_kind) {
    reported.kind = batch.text(event.spec_kind);
    if (event.has_window) reported.sliding_window = event.spec_window;
  }
  const GroupFault learned = groups_.learn(event.group_idx, event.has_kind ? &reported : nullptr,
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
  const Owner& own = shared_.owners[chain.owner];
  const uint64_t size = event.block_size;
  for (const auto& [group_idx, group] : groups_.known()) {
    if (!group.spec.takes_part() || group.block_size == 0) continue;
    const auto place = std::find_if(places_.begin(), places_.end(), [&](const Place& some) {
      return some.group_idx == group_idx && some.chunk == own.chunk && some.medium == *own.medium;
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

}  // namespace kvindex
