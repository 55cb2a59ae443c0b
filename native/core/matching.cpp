#include "core/matching.hpp"

#include <algorithm>
#include <bit>
#include <limits>
#include <map>
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
      if (shared_.summaries[slot].skips_holes == 0 || ranks_[slot].blocks == nullptr) continue;
      skipping_.insert(shared_.summaries[slot].skips_holes);
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
    may_skip_ = skipping_.contains(name_->block_size);
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
    const RankSummary& summary = shared_.summaries[slot];
    if (summary.only_size == 0) return answer_generally(ranks_[slot], summary, first);
    const Held* found = nullptr;
    for (uint32_t i = first; i != kNone; i = scratch_.held[i].next_of_rank) {
      const Held& held = scratch_.held[i];
      if (held.block_size != summary.only_size) continue;
      if (shared_.owners[held.owner].group_idx != summary.only_group) continue;
      if (found != nullptr) return answer_generally(ranks_[slot], summary, first);
      found = &held;
    }
    // As nearly always: one group on one medium.
    if (found == nullptr || found->start != 0) return;
    const uint32_t blocks = end(found->stop);
    const uint64_t tokens = uint64_t{blocks} * summary.only_size;
    const Owner& owner = shared_.owners[found->owner];
    const TieredHit hit{tokens, owner.tier == kDeviceTier ? tokens : 0,
                        owner.tier <= kHostTier ? tokens : 0};
    add(ranks_[slot], summary, summary.only_size, hit);
    add_medium(owner.medium, blocks);
  }

  // Where a span ends. Those that the last walk left open are not closed one by one.
  uint32_t end(uint32_t stop) const { return stop == kNone ? stop_ : stop; }

  // The best answer over the rank's ways of hashing (with and without lookahead).
  void answer_generally(const RankSlot& rank, const RankSummary& summary, uint32_t first) {
    const RankGroups& groups = rank.blocks->groups();
    std::set<uint32_t> lookaheads;
    each_held(first, groups.unit(), [&](const Held& held) { lookaheads.insert(held.lookahead); });
    TieredHit most;
    Hashed best_groups;
    uint32_t best = 0;
    for (const uint32_t lookahead : lookaheads) {
      Spread spread = spread_of(first, groups, lookahead);
      const Hashed hashed = hashed_groups(groups, spread);
      const TieredHit hit =
          tiered_hit(groups.summary().cache, query_.tokens.length, coverage(hashed, spread));
      if (hit.tokens <= most.tokens) continue;
      most = hit;
      best = lookahead;
      best_groups = hashed;
    }
    if (most.tokens == 0) return;
    const auto [main_idx, main] = main_group(best_groups);
    add(rank, summary, main->block_size, most);
    const auto units = static_cast<uint32_t>(most.tokens / groups.unit());
    const uint32_t scale = main->block_size / groups.unit();
    std::vector<std::pair<const std::string*, Spans>> media;  // chunks have owners of their own
    each_held(first, groups.unit(), [&](const Held& held) {
      const Owner& owner = shared_.owners[held.owner];
      if (held.lookahead != best || owner.group_idx != main_idx) return;
      auto medium = std::find_if(media.begin(), media.end(),
                                 [&](const auto& some) { return some.first == owner.medium; });
      if (medium == media.end()) medium = media.insert(media.end(), {owner.medium, {}});
      const Spans some = counted(groups, held);
      medium->second.insert(medium->second.end(), some.begin(), some.end());
    });
    for (auto& [medium, all] : media) {
      uint32_t count = 0;
      for (const auto& [start, stop] : merged(std::move(all))) {
        const uint32_t within = std::min(stop, units);
        if (within > start) count += within / scale - start / scale;
      }
      if (count != 0) add_medium(medium, count);
    }
  }

  template <class Visit>
  void each_held(uint32_t first, uint32_t unit, Visit&& visit) const {
    for (uint32_t i = first; i != kNone; i = scratch_.held[i].next_of_rank) {
      if (scratch_.held[i].block_size == unit) visit(scratch_.held[i]);
    }
  }

  Spans spans(const Held& held) const {
    Spans all{{held.start, end(held.stop)}};
    for (uint32_t i = held.further; i != kNone; i = scratch_.further[i].next) {
      all.emplace_back(scratch_.further[i].start, end(scratch_.further[i].stop));
    }
    return all;
  }

  // Likewise those that count.
  Spans counted(const RankGroups& groups, const Held& held) const {
    const Owner& owner = shared_.owners[held.owner];
    if (owner.tier == kDeviceTier) return spans(held);
    return groups.whole_chunks(spans(held), owner.group_idx, owner.chunk);
  }

  // What a rank holds of the prompt, by tier and group.
  using Spread = std::array<std::map<uint32_t, Spans>, kTiers>;
  using Hashed = std::map<uint32_t, const Group*>;

  Spread spread_of(uint32_t first, const RankGroups& groups, uint32_t lookahead) const {
    Spread spread;
    each_held(first, groups.unit(), [&](const Held& held) {
      if (held.lookahead != lookahead) return;
      const Owner& owner = shared_.owners[held.owner];
      const Spans some = counted(groups, held);
      if (some.empty()) return;
      Spans& all = spread[owner.tier][owner.group_idx];
      all.insert(all.end(), some.begin(), some.end());
    });
    for (auto& tier : spread) {
      for (auto& [group_idx, all] : tier) all = merged(std::move(all));
    }
    return spread;
  }

  static Spans merged(Spans parts) {
    std::sort(parts.begin(), parts.end());
    Spans all;
    for (const auto& [start, stop] : parts) extend_spans(all, start, stop);
    return all;
  }

  // The groups that a hit depends on. Of several of unknown kinds, only the one that reaches
  // furthest: one of them has full attention, and holds every block that any of them needs.
  static Hashed hashed_groups(const RankGroups& groups, const Spread& spread) {
    Hashed hashed;
    std::optional<std::pair<uint32_t, uint32_t>> longest;  // how far, and which
    for (const auto& [group_idx, group] : groups.known()) {
      if (!group.spec.takes_part() || group.block_size == 0) continue;
      if (!groups.summary().kinds_unknown || group.kind_known) {
        hashed[group_idx] = &group;
        continue;
      }
      Spans all;
      for (const auto& tier : spread) {
        const auto found = tier.find(group_idx);
        if (found != tier.end()) all.insert(all.end(), found->second.begin(), found->second.end());
      }
      all = merged(std::move(all));
      const uint32_t reach = all.empty() || all[0].first != 0 ? 0 : all[0].second;
      if (!longest || reach > longest->first) longest = {reach, group_idx};
    }
    if (longest) hashed[longest->second] = &groups.known().at(longest->second);
    return hashed;
  }

  static Tiers coverage(const Hashed& hashed, Spread& spread) {
    Tiers tiers;
    for (size_t tier = 0; tier < kTiers; ++tier) {
      if (spread[tier].empty()) continue;
      for (const auto& [group_idx, group] : hashed) {
        tiers[tier].push_back(
            {&group->spec, group->block_size, std::move(spread[tier][group_idx]), group->eagle});
      }
    }
    return tiers;
  }

  // The group whose blocks the answer counts: the first that needs all blocks, else the first.
  static std::pair<uint32_t, const Group*> main_group(const Hashed& hashed) {
    for (const auto& [group_idx, group] : hashed) {
      if (group->spec.needs_all()) return {group_idx, group};
    }
    return *hashed.begin();
  }

  void add(const RankSlot& rank, const RankSummary& summary, uint32_t block_size,
           const TieredHit& hit) {
    const auto media = static_cast<uint32_t>(answer_.media.size());
    answer_.ranks.push_back({rank.id, block_size, hit.tokens, hit.device_tokens, hit.host_tokens,
                             media, 0, rank.order,
                             summary.upper_bound || hit.tokens > hit.device_tokens,
                             summary.places_missing});
    if (hit.tokens > best_tokens_ || (hit.tokens == best_tokens_ && rank.order < best_order_)) {
      best_tokens_ = hit.tokens;
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
  std::set<uint32_t> skipping_;  // units where some rank's match may skip a hole
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
