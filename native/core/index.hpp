// The index: events in, answers out. It knows no Python; kvindex/index/native.py dresses it.
//
// Locking rule: one `RwLock` guards everything. `apply` and whatever else changes something holds
// it alone, queries and insight hold it together. Payloads are decoded and tokens are converted
// before it is taken. Nothing is called back while it is held.
//
// A long change of a rank gives the lock back every thousand blocks (`Hold`). Until it is done,
// the rank's slot says `changing`: queries answer from the part that is done, and whoever wants to
// change, copy, list or check that rank waits. Changes of other ranks do not wait.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <new>
#include <optional>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/matching.hpp"
#include "core/prefixes.hpp"
#include "core/rank_blocks.hpp"
#include "core/rw_lock.hpp"

namespace kvindex {

// Counts of one rank, as `Index.statistics` shows them.
struct RankStatistics {
  uint64_t blocks = 0;
  uint64_t orphans = 0;
  uint64_t orphans_dropped = 0;
  uint64_t ambiguous = 0;
  uint64_t duplicates = 0;
  uint64_t salted = 0;
  std::map<std::string, uint64_t> loras;  // blocks by LoRA
  std::map<std::string, uint64_t> media;  // blocks by medium, in all groups
  std::array<uint64_t, static_cast<size_t>(Counter::kCount)> counters{};
  std::array<uint64_t, static_cast<size_t>(Ignored::kCount)> ignored{};
  std::map<std::string, uint64_t> skipped;
  std::map<uint32_t, Group> groups;
};

struct TreeStatistics {
  uint64_t blocks = 0;         // resident (block, group) pairs of all ranks
  uint64_t unique_blocks = 0;  // in the shared tree
  uint64_t runs = 0;           // pieces that the tree is kept in
};

// One resident block in one place.
struct ResidentBlock {
  uint64_t value = 0;  // the label, if it is an int
  std::string name;    // the label, if it is bytes
  uint32_t depth = 0;
  std::string medium;
  uint32_t group_idx = 0;
  uint64_t copies = 0;
  Namespace name_space;
};

// Thrown by every method once memory ran out within a change.
class HalfDone : public std::bad_alloc {
 public:
  const char* what() const noexcept override {
    return "memory ran out while the index was changed: make a new one";
  }
};

// Thrown for an image that does not fit a limit of blocks; says which.
struct NoRoom : std::runtime_error {
  NoRoom(uint64_t wanted_blocks, uint64_t room_for, const char* limit)
      : std::runtime_error(limit), wanted(wanted_blocks), room(room_for) {}

  uint64_t wanted;
  uint64_t room;
};

class Index {
 public:
  using RankId = uint32_t;  // never used twice
  // Called by a thread that has to wait for the lock, or gives it back in a long change.
  using BeforeWaiting = void (*)();

  Index(const KeyMaker::Secrets& secrets, const Scramble& scramble,
        std::optional<uint64_t> max_blocks, std::optional<uint64_t> max_blocks_per_rank,
        size_t max_orphans, BeforeWaiting before_waiting = [] {});

  // Make a rank; it comes last in the order of ranks.
  RankId add();
  // The others are false, or return nothing, if the rank is gone.
  bool remove(RankId rank);
  bool clear(RankId rank);
  bool configure(RankId rank, const CacheSettings& settings);
  bool apply(RankId rank, const Batch& batch);

  // Say which rank comes before which where they hold equally much; those left out come last.
  void set_order(const std::vector<RankId>& ranks);

  // All that is held and known of a rank.
  std::optional<RankImage> image(RankId rank) const;
  // Replace it, of a rank that is there or of a new one, by an image that was checked; say which
  // rank it is. Throws NoRoom, and ImageError if more media or chains come than any index can have;
  // then nothing has changed.
  RankId restore(std::optional<RankId> rank, const RankImage& image);
  // A prefix key of contents that never change.
  Key key_check() const;

  void match(const Query& query, Answer& answer) const;
  // Likewise, unless that had to wait: then false.
  bool try_match(const Query& query, Answer& answer) const;

  // Likewise, with all that the ranks hold of the prompt at that moment.
  void look(const Query& query, Answer& answer, std::vector<Holding>& holdings) const;

  uint64_t size() const;
  std::optional<uint64_t> size(RankId rank) const;
  std::optional<std::vector<RankBlocks::Salt>> salts(RankId rank) const;
  // The block sizes of what is held of one LoRA, ascending.
  std::vector<uint32_t> block_sizes(std::string_view lora) const;
  // Whether any rank has stored text among its tokens.
  bool stored_text() const;
  TreeStatistics statistics() const;
  std::optional<RankStatistics> statistics(RankId rank) const;
  std::optional<std::vector<ResidentBlock>> walk(RankId rank) const;

  // Who holds which prefixes. Others may change the index between two pieces of the walk.
  PrefixTree prefixes(uint64_t max_nodes, uint64_t min_blocks, const RankRows& rows,
                      bool only_rows) const;

  // Assert every invariant. Throws InvariantError. O(everything).
  void check() const;

 private:
  static constexpr uint32_t kGone = 0xffffffffu;

  // The lock, held alone or together. Throw HalfDone.
  std::unique_lock<RwLock> alone() const;
  std::shared_lock<RwLock> together() const;
  // Let the lock go until no change of this rank (of any rank) is under way.
  template <class Held>
  void wait_unchanging(Held& held, std::optional<RankId> rank) const;
  bool is_changing(std::optional<RankId> rank) const;

  uint32_t slot_of(RankId rank) const { return rank < slot_of_.size() ? slot_of_[rank] : kGone; }
  RankBlocks* find(RankId rank) const;
  RankId make_rank();
  // Make `Shared::sizes` anew if something in it has changed.
  void renew_sizes();
  // Give memory back to the system once much less is held than before; called without the lock.
  void trim_if_shrunk();
  class Change;
  template <class Work>
  bool change(RankId rank, Work&& work);

  mutable RwLock lock_;
  BeforeWaiting before_waiting_;
  mutable std::condition_variable_any changed_;  // a long change is done
  bool half_done_ = false;
  Shared shared_;
  std::vector<RankSlot> slots_;
  std::vector<uint32_t> slot_of_;  // by rank; kGone for those that were removed
  std::vector<uint32_t> free_slots_;
  uint64_t most_used_ = 0;  // since memory was given back
};

}  // namespace kvindex
