// What one rank holds, as its events tell it: each event's meaning, engine by engine.
//
// The Python twin, kvindex/index/reference/rank_blocks.py, says why each rule is as it is. Owned by the index,
// under its lock.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "core/batch.hpp"
#include "core/few.hpp"
#include "core/groups.hpp"
#include "core/hold.hpp"
#include "core/labels.hpp"
#include "core/orphans.hpp"
#include "core/proofs.hpp"
#include "core/rank_image.hpp"

namespace kvindex {

enum class Counter : uint8_t {
  stored, stored_text, reannounced, orphaned, orphans_attached, unplaced,
  removed, removed_unknown, removed_orphans, removed_ambiguous, cleared,
  proofs, proofs_missed,
  kCount
};

enum class Ignored : uint8_t {
  too_many_media, block_size, token_count, extra_keys_count, lookahead_count,
  too_many_groups, group_kind, partial_block, too_many_block_sizes, unit_changed,
  position_unknown, parent_namespace, parent_ambiguous, max_blocks,
  max_blocks_per_rank, too_many_units,
  kCount
};

extern const std::array<const char*, static_cast<size_t>(Counter::kCount)> kCounterNames;
extern const std::array<const char*, static_cast<size_t>(Ignored::kCount)> kIgnoredNames;

// What a query wants to know of a rank's groups, side by side for all ranks.
struct RankSummary {
  uint32_t only_group = 0;  // as in `RankGroups::Summary`
  uint32_t only_size = 0;
  uint32_t skips_holes = 0;  // the unit in whose walks the rank's match may skip holes, or 0
  bool upper_bound = false;
  uint32_t block_size = 0;  // of the group whose blocks an answer counts; 0 while it is not known
  uint32_t unit = 0;        // `RankGroups::unit`
  bool places_missing = false;  // `RankBlocks::places_missing`
};

// The block size and the unit of each rank, 0 while they are not known; and whether it stored blocks
// whose place is not known.
struct RankSize {
  uint32_t rank = 0;  // its id
  uint32_t block_size = 0;
  uint32_t unit = 0;
  bool places_missing = false;
};
using RankSizes = std::vector<RankSize>;

// What all ranks of an index share.
struct Shared {
  explicit Shared(const KeyMaker& key_maker, const Scramble& label_scramble)
      : keys(key_maker), scramble(label_scramble), tree(keys), names(keys) {}

  const KeyMaker keys;
  const Scramble scramble;
  Tree tree;
  Owners owners;
  Media media;
  LabelNames names;
  Budget budget;
  size_t max_orphans = 0;
  std::vector<RankSummary> summaries;  // by slot
  // Replaced as a whole while an answer keeps it; null from a change of it to the end of that.
  std::shared_ptr<RankSizes> sizes;
  // Of the event that is applied; put aside while another one goes first.
  struct Scratch {
    std::vector<Stretch> chain;  // of `place`
    std::vector<Label> labels;
    std::vector<Digest> contents;
  };
  Scratch scratch;

  void drop_scratch() {
    scratch = Scratch();
    tree.drop_scratch();
  }
};

struct Counts {
  std::array<uint64_t, static_cast<size_t>(Counter::kCount)> counters{};
  std::array<uint64_t, static_cast<size_t>(Ignored::kCount)> ignored{};
  std::map<std::string, uint64_t> skipped;
};

// What a rank applied while no block size on the device was known, and its counts before.
class Early {
 public:
  static constexpr size_t kMostBytes = size_t{16} << 20;

  explicit Early(const Counts& counts) : before(counts) {}
  // Keep a batch; say whether there was room.
  bool keep(const Batch& batch) {
    bytes_ += batch.size();
    if (bytes_ <= kMostBytes) batches.push_back(batch);
    return bytes_ <= kMostBytes;
  }

  Counts before;
  std::vector<Batch> batches;

 private:
  size_t bytes_ = 0;
};

// Must be cleared before it is dropped, unless all that is shared goes too.
class RankBlocks {
 public:
  static constexpr size_t kMostTags = 64;    // distinct unknown event tags counted by name
  static constexpr size_t kMostPlaces = 64;  // distinct (medium, group) places of one rank
  // Labels remembered as ambiguous; beyond it all count as such.
  static constexpr size_t kMostTorn = 65'536;
  // Of one block: it counts once for all bounds, and is placed without letting others go first.
  static constexpr size_t kMostUnits = Hold::kBlocks;
  // Looks at held blocks that clears may take to find what they drop, and how many each stored block
  // adds: so clears, too, cost in proportion to what was sent.
  static constexpr uint64_t kClearLooks = 1 << 23;
  static constexpr uint64_t kClearLooksABlock = 16;
  // Of proofs, and none that succeeded: then the engine hashes otherwise.
  static constexpr uint64_t kMostMisses = 8;
  static constexpr size_t kMostSalts = 64;        // distinct first extra keys remembered
  static constexpr size_t kMostSaltBytes = 256;  // longer ones are not

  RankBlocks(Shared& shared, uint32_t slot);
  RankBlocks(const RankBlocks&) = delete;
  RankBlocks& operator=(const RankBlocks&) = delete;

  void apply(const Batch& batch, Hold& hold);

  // Take the user's word for what the events leave unsaid.
  void configure(const CacheSettings& settings);

  // Forget everything held and learned: what comes next may be another engine's.
  void clear(Hold& hold);

  // All that is held and known, and back: then there must be nothing yet, `media` must be those of
  // the image's places, and the image must have been checked.
  RankImage image() const;
  void restore(const RankImage& image, const std::vector<const std::string*>& media);

  const Labels& labels() const { return labels_; }
  const Orphans& orphans() const { return orphans_; }
  const RankGroups& groups() const { return groups_; }
  // Whether blocks were left out, or their place is not known: hits may be longer.
  bool places_missing() const {
    return left_out_ || orphans_.forgot() || orphans_.size() != 0;
  }
  // Whether the engine's hits may be shorter than the answers.
  bool upper_bound() const { return groups_.summary().upper_bound || removals_unknown_; }
  uint64_t counter(Counter counter) const {
    return counts_.counters[static_cast<size_t>(counter)];
  }
  uint64_t ignored(Ignored reason) const { return counts_.ignored[static_cast<size_t>(reason)]; }
  const std::map<std::string, uint64_t>& skipped() const { return counts_.skipped; }
  // Call `visit(medium, blocks of the tree)` for each place that blocks can be in.
  template <class Visit>
  void each_place(Visit&& visit) const {
    for (const Place& place : places_) {
      visit(*shared_.owners[place.owner].medium, shared_.tree.held(place.owner));
    }
  }
  // The last LoRAs and extra keys that prompts started under, where they had some.
  using Salt = std::pair<std::string, std::string>;
  const std::vector<Salt>& salts() const { return salts_; }

 private:
  struct Place {
    uint32_t group_idx = 0;
    std::string medium;
    uint32_t chunk = 0;  // as `Owner::chunk`
    OwnerId owner = 0;
  };
  // Consecutive blocks that an event stores at one place.
  struct Chain {
    RootId root = 0;
    const Label* labels = nullptr;
    const Digest* contents = nullptr;  // of each unit
    size_t count = 0;                  // of labels
    size_t scale = 1;                  // units to a block
    OwnerId owner = 0;
    bool salted = false;  // of a chain that starts its prompts

    Chain after(size_t start) const {
      return {root, labels + start, contents + start * scale, count - start, scale, owner, salted};
    }
    Chain first(size_t most) const {
      return {root, labels, contents, std::min(count, most), scale, owner, salted};
    }
  };

  void count(Counter counter, uint64_t by) {
    counts_.counters[static_cast<size_t>(counter)] += by;
  }
  void ignore(Ignored reason, uint64_t blocks) {
    counts_.ignored[static_cast<size_t>(reason)] += blocks;
    left_out_ = left_out_ || blocks != 0;
  }
  // Why there was no room for a block.
  Ignored no_room() const {
    return labels_.full() ? Ignored::max_blocks_per_rank : Ignored::max_blocks;
  }
  void summarize();
  bool has_chunks() const;
  void skip(std::string_view tag);
  void drop_cleared(Hold& hold);
  void drop_all(Hold& hold);
  void drop_places();

  std::optional<OwnerId> place(const Batch& batch, const Event& event);
  Label label(const Batch& batch, const WireHash& hash);

  void store(const Batch& batch, const Event& event, Hold& hold);
  void gather_labels(const Batch& batch, const Event& event, Hold& hold);
  void learn_sizes(const Batch& batch, Hold& hold);
  void apply_again(const Early& early, Hold& hold);
  Ignored learn(const Batch& batch, const Event& event);
  bool names_only(const Batch& batch, const Event& event) const;
  void store_whole(const Batch& batch, const Event& event, OwnerId owner, const Label* parent,
                   Hold& hold);
  void store_chain(const Batch& batch, const Event& event, Chain chain, const Label* parent,
                   Hold& hold);
  bool learn_salt(std::string_view lora, std::string_view extra);
  void store_at_root(const Batch& batch, const Event& event, const Chain& chain, Hold& hold);
  void store_after(BlockRef parent, const Label& parent_label, const Chain& chain, Hold& hold);
  void store_detached(const Batch& batch, const Event& event, const Label& parent,
                      const Chain& chain, Hold& hold);
  bool is_announced_again(const Event& event, const Chain& chain, Hold& hold);
  bool would_be_found(const Event& event, const Chain& chain, Hold& hold) const;
  bool is_torn(const Label& label) const;
  void store_sparsely(const Event& event, OwnerId owner, Hold& hold);
  bool store_proven(const Batch& batch, const Event& event, OwnerId owner, Hold& hold);
  bool place_proven(const Batch& batch, const Event& event, RootId root, OwnerId owner,
                    const std::vector<Proofs::Step>& steps, std::vector<size_t> places, Hold& hold);
  std::optional<BlockRef> anchor(const Batch& batch, const Event& event, RootId root,
                                 std::vector<Proofs::Step>& gap);
  void place_sparsely(BlockRef parent, const Chain& chain, const std::vector<size_t>& starts,
                      Hold& hold);
  bool place_unnamed(BlockRef& last, const Chain& chain, size_t start, size_t stop);
  std::vector<BlockRef> tail_before(const Event& event, const Label& label, size_t count,
                                    BlockRef before) const;
  bool holds(BlockRef block) const;
  void relocate(const Label* labels, size_t count, OwnerId owner, Hold& hold);
  BlockRef place(BlockRef parent, Chain chain, Hold& hold);
  size_t place_some(BlockRef& last, const Chain& chain, Hold& hold);
  size_t place_scaled(BlockRef& last, const Chain& chain, Hold& hold);
  size_t add_labels(const Chain& chain);
  void attach(std::vector<std::pair<Label, BlockRef>> placed, Hold& hold);
  BlockRef attach_one(const Label& label, const Orphan& orphan, BlockRef parent);
  bool add_copy(const Label& label, BlockRef block, OwnerId owner, uint64_t copies = 1);
  bool add_copies(const Label& label, BlockRef block, const std::vector<Copies>& copies);
  void own_chain(size_t blocks, OwnerId owner);

  Label restored_label(const RankImage& image, const WireHash& label);
  std::vector<BlockRef> restore_blocks(const RankImage& image, const std::vector<RootId>& roots);
  void restore_owners(const RankImage& image, const std::vector<BlockRef>& blocks);
  void restore_labels(const RankImage& image, const std::vector<BlockRef>& blocks);
  void restore_odd_copies(const RankImage& image, const std::vector<BlockRef>& blocks);
  void restore_orphans(const RankImage& image, const std::vector<RootId>& roots);
  std::vector<Copies> restored_copies(const std::vector<CopiesImage>& copies) const;

  void remove(const Batch& batch, const Event& event, Hold& hold);
  using Left = std::optional<uint64_t>;  // how many copies a removal leaves; none: one less
  using Held = std::vector<std::pair<OwnerId, BlockRef>>;
  void remove_one(const Label& label, const Few<OwnerId>& owners, Left left, Hold& hold);
  Held held_in(const Label& label, const Few<OwnerId>& owners, Hold& hold);
  void remove_several(const Label& label, const Held& held, Left left, Hold& hold);

  Shared& shared_;
  const uint32_t slot_;
  Labels labels_;
  Orphans orphans_;
  RankGroups groups_;
  Proofs proofs_;
  std::vector<Place> places_;
  Counts counts_;
  // Null once a size on the device is known, or there was too much.
  std::unique_ptr<Early> early_ = std::make_unique<Early>(counts_);
  // Whether the engine announced blocks again whose last label is this one, as the first group of a
  // batch showed.
  std::optional<std::pair<Label, bool>> announced_;
  bool positions_unknown_ = false;
  bool left_out_ = false;          // stored blocks were ignored
  bool removals_unknown_ = false;  // unknown events may have taken blocks away
  uint64_t clear_looks_ = kClearLooks;
  std::vector<Salt> salts_;  // the newest last: for explanations to try
  // Labels of several blocks of which one went away: the others cannot be identified.
  std::unordered_set<Label, LabelHash> torn_;
};

}  // namespace kvindex
