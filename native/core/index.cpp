#include "core/index.hpp"

#include <algorithm>
#include <atomic>
#include <utility>

#include "core/invariant.hpp"

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace kvindex {

namespace {

constexpr uint32_t kLastInOrder = 0xffffffffu;
// Resident blocks that are gone: some megabytes, or all there was and not next to nothing.
constexpr uint64_t kWorthTrimming = 100'000;
constexpr uint64_t kWorthTrimmingAll = 5'000;

}  // namespace

Index::Index(const KeyMaker::Secrets& secrets, const Scramble& scramble,
             std::optional<uint64_t> max_blocks, std::optional<uint64_t> max_blocks_per_rank,
             size_t max_orphans, BeforeWaiting before_waiting)
    : before_waiting_(before_waiting), shared_(KeyMaker(secrets), scramble) {
  shared_.budget.limit = max_blocks;
  shared_.budget.rank_limit = max_blocks_per_rank;
  shared_.max_orphans = max_orphans;
  renew_sizes();
}

// Locking ------------------------------------------------------------------------------------

std::unique_lock<RwLock> Index::alone() const {
  std::unique_lock held(lock_, std::try_to_lock);
  if (!held.owns_lock()) {
    before_waiting_();
    held.lock();
  }
  if (half_done_) throw HalfDone();
  return held;
}

std::shared_lock<RwLock> Index::together() const {
  std::shared_lock held(lock_, std::try_to_lock);
  if (!held.owns_lock()) {
    before_waiting_();
    held.lock();
  }
  if (half_done_) throw HalfDone();
  return held;
}

bool Index::is_changing(std::optional<RankId> rank) const {
  if (!rank) {
    return std::any_of(slots_.begin(), slots_.end(),
                       [](const RankSlot& slot) { return slot.changing; });
  }
  const uint32_t slot = slot_of(*rank);
  return slot != kGone && slots_[slot].changing;
}

template <class Held>
void Index::wait_unchanging(Held& held, std::optional<RankId> rank) const {
  while (is_changing(rank)) {
    before_waiting_();
    changed_.wait(held);
    if (half_done_) throw HalfDone();
  }
}

// A change of one rank, which gives the lock back now and then.
class Index::Change final : public Hold {
 public:
  Change(Index& index, RankId rank) : index_(index), held_(index.alone()) {
    slot_ = index_.slot_of(rank);
    if (slot_ != kGone && index_.slots_[slot_].changing) {
      index_.wait_unchanging(held_, rank);
      slot_ = index_.slot_of(rank);
    }
    index_.half_done_ = true;  // if the work throws, it stays so
  }
  ~Change() override {
    if (!paused_) return;
    if (slot_ != kGone) index_.slots_[slot_].changing = false;
    index_.changed_.notify_all();
  }

  void done() { index_.half_done_ = false; }

 private:
  void pause(const std::function<void()>& work) override {
    index_.slots_[slot_].changing = true;
    auto scratch = std::exchange(index_.shared_.scratch, {});
    index_.renew_sizes();
    index_.half_done_ = false;
    held_.unlock();
    index_.before_waiting_();
    paused_ = true;
    if (work) work();
    held_.lock();
    if (index_.half_done_) throw HalfDone();
    index_.half_done_ = true;
    index_.shared_.scratch = std::move(scratch);
  }

  Index& index_;
  std::unique_lock<RwLock> held_;
  uint32_t slot_ = kGone;
  bool paused_ = false;
};

// Ranks --------------------------------------------------------------------------------------

RankBlocks* Index::find(RankId rank) const {
  const uint32_t slot = slot_of(rank);
  return slot == kGone ? nullptr : slots_[slot].blocks.get();
}

Index::RankId Index::add() {
  const auto held = alone();
  half_done_ = true;
  const RankId rank = make_rank();
  renew_sizes();
  half_done_ = false;
  return rank;
}

Index::RankId Index::make_rank() {
  if (free_slots_.empty()) {
    free_slots_.push_back(static_cast<uint32_t>(slots_.size()));
    slots_.emplace_back();
  }
  const uint32_t slot = free_slots_.back();
  free_slots_.pop_back();
  const auto rank = static_cast<RankId>(slot_of_.size());
  slots_[slot] = {std::make_unique<RankBlocks>(shared_, slot), rank, kLastInOrder};
  slot_of_.push_back(slot);
  if (shared_.sizes != nullptr && shared_.sizes.use_count() == 1) {  // no answer keeps them
    std::atomic_thread_fence(std::memory_order_acquire);
    shared_.sizes->push_back({rank, 0, 0, false});
  } else {
    shared_.sizes.reset();
  }
  return rank;
}

void Index::renew_sizes() {
  if (shared_.sizes != nullptr) return;
  auto sizes = std::make_shared<RankSizes>();
  for (uint32_t slot = 0; slot < slots_.size(); ++slot) {
    if (slots_[slot].blocks == nullptr) continue;
    const RankSummary& summary = shared_.summaries[slot];
    sizes->push_back({slots_[slot].id, summary.block_size, summary.unit, summary.places_missing});
  }
  shared_.sizes = std::move(sizes);
}

template <class Work>
bool Index::change(RankId rank, Work&& work) {
  bool shrunk = false;
  {
    Change change(*this, rank);
    RankBlocks* blocks = find(rank);
    if (blocks != nullptr) work(*blocks, change);
    renew_sizes();
    change.done();
    if (blocks == nullptr) return false;
    const uint64_t used = shared_.budget.used;
    if (used > most_used_) {
      most_used_ = used;
    } else if (used * 2 < most_used_ &&
               most_used_ - used > (used == 0 ? kWorthTrimmingAll : kWorthTrimming)) {
      most_used_ = used;
      shrunk = true;
    }
  }
  if (shrunk) trim_if_shrunk();
  return true;
}

bool Index::remove(RankId rank) {
  return change(rank, [&](RankBlocks& blocks, Hold& hold) {
    const uint32_t slot = slot_of_[rank];
    blocks.clear(hold);
    slots_[slot] = RankSlot{};
    shared_.sizes.reset();
    slot_of_[rank] = kGone;
    free_slots_.push_back(slot);
  });
}

bool Index::clear(RankId rank) {
  return change(rank, [](RankBlocks& blocks, Hold& hold) { blocks.clear(hold); });
}

bool Index::configure(RankId rank, const CacheSettings& settings) {
  return change(rank, [&](RankBlocks& blocks, Hold&) { blocks.configure(settings); });
}

bool Index::apply(RankId rank, const Batch& batch) {
  return change(rank, [&](RankBlocks& blocks, Hold& hold) { blocks.apply(batch, hold); });
}

void Index::set_order(const std::vector<RankId>& ranks) {
  const auto held = alone();
  for (RankSlot& slot : slots_) slot.order = kLastInOrder;
  for (uint32_t i = 0; i < ranks.size(); ++i) {
    if (const uint32_t slot = slot_of(ranks[i]); slot != kGone) slots_[slot].order = i;
  }
}

void Index::trim_if_shrunk() {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

// Snapshots ----------------------------------------------------------------------------------

std::optional<RankImage> Index::image(RankId rank) const {
  auto held = together();
  wait_unchanging(held, rank);
  const RankBlocks* blocks = find(rank);
  if (blocks == nullptr) return std::nullopt;
  return blocks->image();
}

Index::RankId Index::restore(std::optional<RankId> rank, const RankImage& image) {
  const uint64_t wanted = image.resident();
  auto held = alone();
  if (rank) wait_unchanging(held, rank);
  const RankBlocks* const before = rank ? find(*rank) : nullptr;
  const Budget& budget = shared_.budget;
  const uint64_t staying = budget.used - (before == nullptr ? 0 : before->labels().size());
  if (budget.rank_limit && wanted > *budget.rank_limit) {
    throw NoRoom(wanted, *budget.rank_limit, "max_blocks_per_rank");
  }
  if (budget.limit && (staying > *budget.limit || wanted > *budget.limit - staying)) {
    throw NoRoom(wanted, *budget.limit - std::min(staying, *budget.limit), "max_blocks");
  }
  if (!shared_.tree.has_room(image.chains.size())) throw ImageError("the index has no more room");
  std::vector<const std::string*> media;
  for (const PlaceImage& place : image.places) {
    media.push_back(shared_.media.name(place.medium));
    if (media.back() == nullptr) throw ImageError("the index has no room for more media");
  }
  half_done_ = true;
  const RankId id = before == nullptr ? make_rank() : *rank;
  const uint32_t slot = slot_of(id);
  WholeHold whole;
  slots_[slot].blocks->clear(whole);
  slots_[slot].blocks = std::make_unique<RankBlocks>(shared_, slot);
  slots_[slot].blocks->restore(image, media);
  most_used_ = std::max(most_used_, budget.used);
  renew_sizes();
  half_done_ = false;
  return id;
}

Key Index::key_check() const {
  const KeyMaker& keys = shared_.keys;
  uint32_t narrow[40];
  for (uint32_t i = 0; i < 40; ++i) narrow[i] = i;
  const uint64_t wide[] = {1, uint64_t{1} << 40, 3};
  const Key root = shared_.tree.root_key({16, 1, "lora"});
  Key key = keys.child(root, keys.tokens(narrow, 16));
  key = keys.child(key, keys.with_lookahead(keys.tokens(narrow, 40), wide, 3));
  return keys.child(key, keys.with_extra(keys.tokens(wide, 3), "extra keys"));
}

// Queries ------------------------------------------------------------------------------------

void Index::match(const Query& query, Answer& answer) const {
  const auto held = together();
  find_matches(shared_, slots_, query, answer);
}

bool Index::try_match(const Query& query, Answer& answer) const {
  const std::shared_lock held(lock_, std::try_to_lock);
  if (!held.owns_lock()) return false;
  if (half_done_) throw HalfDone();
  find_matches(shared_, slots_, query, answer);
  return true;
}

void Index::look(const Query& query, Answer& answer, std::vector<Holding>& holdings) const {
  const auto held = together();
  find_matches(shared_, slots_, query, answer);
  holdings = find_holdings(shared_, slots_, query);
}

// Insight ------------------------------------------------------------------------------------

uint64_t Index::size() const {
  const auto held = together();
  return shared_.budget.used;
}

std::optional<uint64_t> Index::size(RankId rank) const {
  const auto held = together();
  const RankBlocks* blocks = find(rank);
  if (blocks == nullptr) return std::nullopt;
  return blocks->labels().size();
}

std::optional<std::vector<RankBlocks::Salt>> Index::salts(RankId rank) const {
  const auto held = together();
  const RankBlocks* blocks = find(rank);
  if (blocks == nullptr) return std::nullopt;
  return blocks->salts();
}

std::vector<uint32_t> Index::block_sizes(std::string_view lora) const {
  const auto held = together();
  std::vector<uint32_t> sizes;
  for (const RootId root : shared_.tree.roots(lora)) {
    if (shared_.tree.root(root).strands != 0) {
      sizes.push_back(shared_.tree.root(root).name.block_size);
    }
  }
  std::sort(sizes.begin(), sizes.end());
  sizes.erase(std::unique(sizes.begin(), sizes.end()), sizes.end());
  return sizes;
}

bool Index::stored_text() const {
  const auto held = together();
  return std::any_of(slots_.begin(), slots_.end(), [](const RankSlot& slot) {
    return slot.blocks != nullptr && slot.blocks->counter(Counter::stored_text) != 0;
  });
}

TreeStatistics Index::statistics() const {
  const auto held = together();
  TreeStatistics statistics;
  statistics.blocks = shared_.budget.used;
  statistics.unique_blocks = shared_.tree.block_count();
  statistics.runs = shared_.tree.segment_count();
  return statistics;
}

std::optional<RankStatistics> Index::statistics(RankId rank) const {
  const auto held = together();
  const RankBlocks* blocks = find(rank);
  if (blocks == nullptr) return std::nullopt;
  RankStatistics statistics;
  statistics.blocks = blocks->labels().size();
  statistics.orphans = blocks->orphans().size();
  statistics.orphans_dropped = blocks->orphans().dropped();
  statistics.ambiguous = blocks->labels().ambiguous();
  statistics.duplicates = blocks->labels().duplicates();
  blocks->labels().each_prompts([&](const Prompts& prompts, uint64_t count) {
    statistics.loras[shared_.tree.root(prompts.root).name.lora] += count;
    if (prompts.salted) statistics.salted += count;
  });
  blocks->each_place([&](const std::string& medium, uint64_t count) {
    if (count != 0) statistics.media[medium] += count;
  });
  for (size_t i = 0; i < statistics.counters.size(); ++i) {
    statistics.counters[i] = blocks->counter(static_cast<Counter>(i));
  }
  for (size_t i = 0; i < statistics.ignored.size(); ++i) {
    statistics.ignored[i] = blocks->ignored(static_cast<Ignored>(i));
  }
  statistics.skipped = blocks->skipped();
  statistics.groups = blocks->groups().known();
  return statistics;
}

std::optional<std::vector<ResidentBlock>> Index::walk(RankId rank) const {
  auto held = together();
  wait_unchanging(held, rank);
  const RankBlocks* blocks = find(rank);
  if (blocks == nullptr) return std::nullopt;
  std::vector<ResidentBlock> all;
  all.reserve(blocks->labels().size());
  blocks->labels().placements([&](const Label& label, BlockRef block) {
    for (const Copies& copies : blocks->labels().held(label, block)) {
      const Owner& owner = shared_.owners[copies.owner];
      all.push_back({label.named ? 0 : label.value,
                     label.named ? shared_.names.text(label) : std::string(),
                     shared_.tree.depth(block), *owner.medium, owner.group_idx, copies.count,
                     shared_.tree.root(shared_.tree.root_of(block)).name});
    }
  });
  return all;
}

PrefixTree Index::prefixes(uint64_t max_nodes, uint64_t min_blocks, const RankRows& rows,
                           bool only_rows) const {
  PrefixWalk walk(max_nodes, min_blocks, rows, only_rows);
  for (bool more = true; more;) {
    const auto held = together();
    more = walk.go_on(shared_, slots_);
  }
  return std::move(walk.found());
}

void Index::check() const {
  auto held = together();
  wait_unchanging(held, std::nullopt);
  std::vector<uint64_t> resident(shared_.owners.size());
  uint64_t size = 0;
  for (const RankSlot& slot : slots_) {
    if (slot.blocks == nullptr) continue;
    slot.blocks->labels().check(resident);
    size += slot.blocks->labels().size();
  }
  require(size == shared_.budget.used, std::to_string(size) + " blocks resident, counted " +
                                           std::to_string(shared_.budget.used));
  shared_.tree.check(resident);
}

}  // namespace kvindex
