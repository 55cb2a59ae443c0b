#include "core/matching.hpp"

#include <algorithm>
#include <bit>
#include <limits>
#include <set>

namespace kvindex {

namespace {

constexpr uint32_t kNone = 0xffffffffu;

// What one owner holds of the prompt in one namespace: its first span, then further ones.
struct Held {
  OwnerId owner;
  uint32_t block_size;  // of the namespace
  uint32_t lookahead;   // likewise
  uint32_t start;
  uint32_t stop;          // kNone: as far as the last walk went
  uint32_t further;       // its next span in Scratch::further
  uint32_t last;          // its last one
  uint32_t next_of_rank;  // the rank's next entry in Scratch::held
};

struct FurtherSpan {
  uint32_t start;
  uint32_t stop;
  uint32_t next;
};

struct OwnerSlot {
  uint64_t walk = 0;      // the walk that wrote the rest
  uint32_t held = kNone;  // kNone: the owner does not count
};

struct RankState {
  uint64_t query = 0;  // the query that wrote `held` and `wanted`
  uint64_t walk = 0;   // the walk that wrote `places` and `alive`
  uint32_t held = kNone;
  uint32_t places = 0;  // in how many the rank holds the blocks that the walk is at
  bool wanted = false;
  bool alive = false;  // whether it held each block so far in one place or another
};

// Memory that a thread keeps from query to query. Numbers of walks and queries never repeat, so
// nothing has to be cleared.
struct Scratch {
  std::vector<Key> keys;
  std::vector<Held> held;
  std::vector<FurtherSpan> further;
  std::vector<OwnerSlot> owners;
  std::vector<RankState> ranks;
  std::vector<uint32_t> touched;  // slots of the ranks that hold something
  std::vector<uint32_t> present;  // owners of the blocks that the walk is at, as a bitmap
  std::vector<uint32_t> next;     // and of those that follow
  uint64_t walks = 0;
  uint64_t queries = 0;
};

class Matcher {
 public:
  Matcher(const Shared& shared, const std::vector<RankSlot>& ranks, const Query& query,
          Answer& answer, Scratch& scratch)
      : shared_(shared), ranks_(ranks), query_(query), answer_(answer), scratch_(scratch) {}

  void run() {
    answer_.ranks.clear();
    answer_.media.clear();
    answer_.best = -1;
    answer_.starved = false;
    prepare();
    for (const RootId root : shared_.tree.roots(query_.lora)) {
      const Root& found = shared_.tree.root(root);
      if (found.strands == 0) continue;
      if (query_.block_size != 0 && found.name.block_size != query_.block_size) continue;
      walk(root);
    }
    if (answer_.starved) return;
    answer_.sizes = shared_.sizes;
    answer_.ranks.reserve(scratch_.touched.size());
    answer_.media.reserve(scratch_.touched.size());
    for (const uint32_t slot : scratch_.touched) answer(slot);
  }

 private:
  void prepare() {
    ++scratch_.queries;
    scratch_.held.clear();
    scratch_.further.clear();
    scratch_.touched.clear();
    if (scratch_.owners.size() < shared_.owners.size()) {
      scratch_.owners.resize(shared_.owners.size());
    }
    scratch_.present.assign((shared_.owners.size() + 31) / 32, 0u);
    scratch_.next.resize(scratch_.present.size());
    if (scratch_.ranks.size() < ranks_.size()) scratch_.ranks.resize(ranks_.size());
    for (uint32_t slot = 0; slot < ranks_.size(); ++slot) {
      if (query_.ranks && asked_for(ranks_[slot])) start_rank(slot, true);
      if (!shared_.summaries[slot].skips_holes || ranks_[slot].blocks == nullptr) continue;
      const std::set<uint32_t>& sizes = ranks_[slot].blocks->groups().window_only();
      window_only_.insert(sizes.begin(), sizes.end());
    }
  }

  bool asked_for(const RankSlot& rank) const {
    return rank.blocks != nullptr &&
           std::binary_search(query_.ranks->begin(), query_.ranks->end(), rank.id);
  }

  void start_rank(uint32_t slot, bool wanted) {
    RankState& state = scratch_.ranks[slot];
    state.query = scratch_.queries;
    state.held = kNone;
    state.wanted = wanted;
  }

  // Walking ----------------------------------------------------------------------------------

  void walk(RootId root) {
    turn_to(kNoOwners, stop_);  // the end of the walk before
    ++scratch_.walks;
    set_ = kNoOwners;
    stop_ = 0;
    alive_ = 0;
    const Root& found = shared_.tree.root(root);
    name_ = &found.name;
    PromptKeys keys(shared_.keys, found, query_.tokens, query_.extras, scratch_.keys);
    may_skip_ = window_only_.contains(name_->block_size);
    bool went_on = true;
    shared_.tree.walk(root, keys, [&](SetId set, uint32_t start, uint32_t stop) {
      if (set != set_) turn_to(set, start);
      stop_ = stop;
      return went_on = alive_ != 0 || may_skip_;
    });
    if (went_on && keys.starved(stop_)) answer_.starved = true;
  }

  // Note whose blocks begin and end at this one. What stays the same costs nothing: so a walk costs
  // as much as there are changes, however many ranks hold its blocks.
  void turn_to(SetId set, uint32_t at) {
    std::vector<uint32_t>& present = scratch_.present;
    std::vector<uint32_t>& next = scratch_.next;
    shared_.tree.sets().write_bitmap(set, next.data(), next.size());
    for (size_t word = 0; word < next.size(); ++word) {
      each_owner(word, next[word] & ~present[word], [&](OwnerId owner) { open(owner, at); });
    }
    for (size_t word = 0; word < next.size(); ++word) {
      each_owner(word, present[word] & ~next[word], [&](OwnerId owner) { close(owner, at); });
    }
    present.swap(next);
    set_ = set;
  }

  template <class Visit>
  static void each_owner(size_t word, uint32_t bits, Visit&& visit) {
    for (; bits != 0; bits &= bits - 1) {
      visit(static_cast<OwnerId>(word * 32 + static_cast<size_t>(std::countr_zero(bits))));
    }
  }

  void open(OwnerId owner, uint32_t at) {
    OwnerSlot& slot = scratch_.owners[owner];
    const uint32_t rank = shared_.owners[owner].rank;
    if (slot.walk != scratch_.walks) {
      slot.walk = scratch_.walks;
      slot.held = counts(owner, rank) ? begin(owner, rank, at) : kNone;
    } else if (slot.held != kNone) {
      begin_again(scratch_.held[slot.held], at);
    }
    if (slot.held == kNone) return;
    RankState& state = scratch_.ranks[rank];
    if (state.walk != scratch_.walks) {
      state.walk = scratch_.walks;
      state.places = 0;
      state.alive = at == 0;
      alive_ += state.alive;
    }
    ++state.places;
  }

  void close(OwnerId owner, uint32_t at) {
    const OwnerSlot& slot = scratch_.owners[owner];
    if (slot.held == kNone) return;
    Held& held = scratch_.held[slot.held];
    (held.last == kNone ? held.stop : scratch_.further[held.last].stop) = at;
    RankState& state = scratch_.ranks[shared_.owners[owner].rank];
    if (--state.places == 0 && state.alive) {
      state.alive = false;
      --alive_;
    }
  }

  bool counts(OwnerId owner, uint32_t rank) {
    RankState& state = scratch_.ranks[rank];
    if (state.query != scratch_.queries) {
      start_rank(rank, !query_.ranks.has_value());
    }
    if (!state.wanted) return false;
    if (!query_.media) return true;
    const std::string& medium = *shared_.owners[owner].medium;
    return std::find(query_.media->begin(), query_.media->end(), medium) != query_.media->end();
  }

  uint32_t begin(OwnerId owner, uint32_t rank, uint32_t at) {
    RankState& state = scratch_.ranks[rank];
    if (state.held == kNone) scratch_.touched.push_back(rank);
    const auto held = static_cast<uint32_t>(scratch_.held.size());
    scratch_.held.push_back(
        {owner, name_->block_size, name_->lookahead, at, kNone, kNone, kNone, state.held});
    state.held = held;
    return held;
  }

  void begin_again(Held& held, uint32_t at) {
    const auto made = static_cast<uint32_t>(scratch_.further.size());
    scratch_.further.push_back({at, kNone, kNone});
    (held.last == kNone ? held.further : scratch_.further[held.last].next) = made;
    held.last = made;
  }

  // Answering --------------------------------------------------------------------------------

  void answer(uint32_t slot) {
    const uint32_t first = scratch_.ranks[slot].held;
    const RankGroups::Only& only = shared_.summaries[slot].only_full;
    if (only.block_size == 0) return answer_generally(ranks_[slot], first);
    const Held* found = nullptr;
    for (uint32_t i = first; i != kNone; i = scratch_.held[i].next_of_rank) {
      if (!is_of(scratch_.held[i], only.group_idx, only.block_size)) continue;
      if (found != nullptr) return answer_generally(ranks_[slot], first);
      found = &scratch_.held[i];
    }
    // As nearly always: one group on one medium.
    if (found == nullptr || found->start != 0) return;
    const uint32_t blocks = end(found->stop);
    add(ranks_[slot], only.block_size, blocks, uint64_t{blocks} * only.block_size);
    add_medium(shared_.owners[found->owner].medium, blocks);
  }

  bool is_of(const Held& held, uint32_t group_idx, uint32_t block_size) const {
    return held.block_size == block_size && shared_.owners[held.owner].group_idx == group_idx;
  }

  // Where a span ends. Those that the last walk left open are not closed one by one.
  uint32_t end(uint32_t stop) const { return stop == kNone ? stop_ : stop; }

  // The best answer over the rank's ways of hashing (with and without lookahead).
  void answer_generally(const RankSlot& rank, uint32_t first) {
    std::set<uint32_t> lookaheads;
    for (uint32_t i = first; i != kNone; i = scratch_.held[i].next_of_rank) {
      lookaheads.insert(scratch_.held[i].lookahead);
    }
    uint64_t most = 0;
    uint32_t best = 0;
    for (const uint32_t lookahead : lookaheads) {
      const uint64_t tokens = engine_hit(coverage(rank, first, lookahead));
      if (tokens > most) {
        most = tokens;
        best = lookahead;
      }
    }
    if (most == 0) return;
    const auto [main_idx, main] = *rank.blocks->groups().main();
    const auto blocks = static_cast<uint32_t>(most / main->block_size);
    add(rank, main->block_size, blocks, most);
    each_held(first, best, main_idx, *main, [&](const Held& held) {
      uint32_t count = 0;
      for (const auto& [start, stop] : spans(held)) {
        const uint32_t within = std::min(stop, blocks);
        if (within > start) count += within - start;
      }
      if (count != 0) add_medium(shared_.owners[held.owner].medium, count);
    });
  }

  template <class Visit>
  void each_held(uint32_t first, uint32_t lookahead, uint32_t group_idx, const Group& group,
                 Visit&& visit) const {
    for (uint32_t i = first; i != kNone; i = scratch_.held[i].next_of_rank) {
      const Held& held = scratch_.held[i];
      if (held.lookahead != lookahead) continue;
      if (is_of(held, group_idx, group.block_size)) visit(held);
    }
  }

  Spans spans(const Held& held) const {
    Spans all{{held.start, end(held.stop)}};
    for (uint32_t i = held.further; i != kNone; i = scratch_.further[i].next) {
      all.emplace_back(scratch_.further[i].start, end(scratch_.further[i].stop));
    }
    return all;
  }

  std::vector<GroupCoverage> coverage(const RankSlot& rank, uint32_t first,
                                      uint32_t lookahead) const {
    std::vector<GroupCoverage> all;
    for (const auto& [group_idx, group] : rank.blocks->groups().known()) {
      if (!group.spec.takes_part()) continue;
      Spans parts;
      each_held(first, lookahead, group_idx, group, [&](const Held& held) {
        const Spans some = spans(held);
        parts.insert(parts.end(), some.begin(), some.end());
      });
      std::sort(parts.begin(), parts.end());
      GroupCoverage covered{&group.spec, std::max(1u, group.block_size), {}};
      for (const auto& [start, stop] : parts) extend_spans(covered.spans, start, stop);
      all.push_back(std::move(covered));
    }
    return all;
  }

  void add(const RankSlot& rank, uint32_t block_size, uint32_t blocks, uint64_t tokens) {
    const auto media = static_cast<uint32_t>(answer_.media.size());
    answer_.ranks.push_back({rank.id, blocks, tokens, block_size, media, 0});
    if (tokens > best_tokens_ || (tokens == best_tokens_ && rank.order < best_order_)) {
      best_tokens_ = tokens;
      best_order_ = rank.order;
      answer_.best = static_cast<int64_t>(answer_.ranks.size()) - 1;
    }
  }

  void add_medium(const std::string* medium, uint32_t blocks) {
    answer_.media.push_back({medium, blocks});
    ++answer_.ranks.back().media_count;
  }

  const Shared& shared_;
  const std::vector<RankSlot>& ranks_;
  const Query& query_;
  Answer& answer_;
  Scratch& scratch_;
  std::set<uint32_t> window_only_;  // block sizes where some rank's match may skip a hole
  bool may_skip_ = false;           // whether this walk's is one
  const Namespace* name_ = nullptr;  // of the walk
  SetId set_ = kNoOwners;  // the owners of the blocks that the walk is at
  uint32_t stop_ = 0;      // up to here it went
  uint32_t alive_ = 0;     // ranks whose match can go on
  uint64_t best_tokens_ = 0;
  uint32_t best_order_ = std::numeric_limits<uint32_t>::max();
};

}  // namespace

void find_matches(const Shared& shared, const std::vector<RankSlot>& ranks, const Query& query,
                  Answer& answer) {
  thread_local Scratch scratch;
  Matcher(shared, ranks, query, answer, scratch).run();
}

}  // namespace kvindex
