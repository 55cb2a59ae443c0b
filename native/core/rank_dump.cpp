// A rank to its image and back: the part of `RankBlocks` that snapshots are made of.
#include <algorithm>
#include <bit>
#include <unordered_map>
#include <utility>

#include "core/rank_blocks.hpp"

namespace kvindex {

namespace {

constexpr uint32_t kNowhere = 0xffffffffu;
constexpr uint32_t kAhead = 12;  // labels that are fetched before they are looked up

// Copies the part of the tree that a rank needs: the blocks that it holds, and all before them.
class ChainCopy {
 public:
  ChainCopy(const Tree& tree, const Labels& labels, RankImage& image)
      : tree_(tree), labels_(labels), image_(image), needed_(tree.strand_limit()),
        chains_(tree.strand_limit(), kNowhere) {
    labels.placements([&](const Label&, BlockRef block) { need(block); });
    for (size_t i = 0; i < strands_.size(); ++i) {
      const BlockRef parent = tree.strand(strands_[i]).parent;
      if (parent != kNoBlock) need(parent);
    }
    std::sort(strands_.begin(), strands_.end());  // nearly as they were made, and lie in memory
    for (const StrandId id : strands_) copy_from_start(id);
    image.labels.assign(image.keys.size(), RankImage::kUnlabelled);
  }

  uint32_t position(BlockRef block) const {
    return image_.chains[chains_[strand_of(block)]].first + offset_of(block);
  }

  // The image's number of a namespace.
  uint32_t root(RootId id) {
    const auto [known, is_new] =
        roots_.try_emplace(id, static_cast<uint32_t>(image_.roots.size()));
    if (is_new) image_.roots.push_back(tree_.root(id).name);
    return known->second;
  }

 private:
  void need(BlockRef block) {
    uint8_t& count = needed_[strand_of(block)];
    if (count == 0) strands_.push_back(strand_of(block));
    count = std::max(count, static_cast<uint8_t>(offset_of(block) + 1));
  }

  // Copy a strand, after those before it.
  void copy_from_start(StrandId id) {
    for (;;) {
      if (chains_[id] != kNowhere) break;
      path_.push_back(id);
      const BlockRef parent = tree_.strand(id).parent;
      if (parent == kNoBlock) break;
      id = strand_of(parent);
    }
    for (; !path_.empty(); path_.pop_back()) copy(path_.back());
  }

  void copy(StrandId id) {
    const Strand& strand = tree_.strand(id);
    chains_[id] = static_cast<uint32_t>(image_.chains.size());
    ChainImage chain;
    chain.root = root(strand.root);
    chain.first = image_.positions();
    chain.count = needed_[id];
    chain.salted = strand.parent == kNoBlock && strand.salted;
    if (strand.parent != kNoBlock) {
      chain.parent = chains_[strand_of(strand.parent)];
      chain.offset = offset_of(strand.parent);
    }
    image_.keys.insert(image_.keys.end(), strand.keys.get(), strand.keys.get() + chain.count);
    for (uint32_t place = 0; place < labels_.places().size(); ++place) {
      const uint64_t held = held_blocks(strand, labels_.places()[place]);
      if (held != 0) image_.holdings.push_back({place, held});
    }
    chain.holdings_end = static_cast<uint32_t>(image_.holdings.size());
    image_.chains.push_back(chain);
  }

  uint64_t held_blocks(const Strand& strand, OwnerId owner) const {
    uint64_t held = 0;
    uint32_t start = 0;
    for (const Segment& segment : strand.segments) {
      if (tree_.sets().contains(segment.owners, owner)) {
        held |= ~uint64_t{0} >> (kStrandBlocks - (segment.stop - start)) << start;
      }
      start = segment.stop;
    }
    return held;
  }

  const Tree& tree_;
  const Labels& labels_;
  RankImage& image_;
  std::vector<uint8_t> needed_;   // blocks by strand
  std::vector<uint32_t> chains_;  // by strand
  std::vector<StrandId> strands_;  // those that are needed
  std::vector<StrandId> path_;
  std::unordered_map<RootId, uint32_t> roots_;
};

// Copies labels and what hangs on them.
class LabelCopy {
 public:
  LabelCopy(const LabelNames& names, const std::vector<OwnerId>& places, RankImage& image)
      : names_(names), image_(image) {
    for (uint32_t place = 0; place < places.size(); ++place) numbers_[places[place]] = place;
  }

  WireHash label(const Label& label) {
    if (!label.named) return {label.value, 0};
    const std::string& name = names_.text(label);
    const WireHash made{image_.text.size(), static_cast<uint32_t>(name.size())};
    image_.text += name;
    return made;
  }

  std::vector<CopiesImage> copies(const std::vector<Copies>& all) const {
    std::vector<CopiesImage> made;
    for (const Copies& some : all) made.push_back({numbers_.at(some.owner), some.count});
    return made;
  }

 private:
  const LabelNames& names_;
  RankImage& image_;
  std::unordered_map<OwnerId, uint32_t> numbers_;
};

void copy_labels(const Labels& labels, const ChainCopy& chains, LabelCopy& copy, RankImage& image) {
  labels.placements([&](const Label& label, BlockRef block) {
    const uint32_t position = chains.position(block);
    WireHash& first = image.labels[position];
    if (first.length != RankImage::kUnlabelled.length) {
      image.further.push_back({position, copy.label(label), copy.copies(labels.held(label, block))});
      return;
    }
    first = copy.label(label);
    if (labels.is_plain(label, block)) return;
    image.odd.push_back({position, copy.copies(labels.held(label, block))});
  });
  labels.ambiguities([&](const Label& label, const BlockSet& blocks) {
    AmbiguousImage ambiguous{copy.label(label), {}};
    blocks.for_each([&](BlockRef block) { ambiguous.positions.push_back(chains.position(block)); });
    image.ambiguous.push_back(std::move(ambiguous));
  });
}

void copy_orphans(const Orphans& orphans, ChainCopy& chains, LabelCopy& copy, RankImage& image) {
  std::vector<std::pair<uint64_t, WaitImage>> waits;
  orphans.for_each([&](const Label& label, const Orphan& orphan, uint64_t turn) {
    const auto number = static_cast<uint32_t>(image.orphans.size());
    image.orphans.push_back({copy.label(label), copy.copies(orphan.copies)});
    if (!orphan.parent) return;
    waits.push_back({turn, {number, copy.label(*orphan.parent), chains.root(orphan.root),
                            orphan.content, orphan.content_bytes}});
  });
  std::sort(waits.begin(), waits.end(),
            [](const auto& one, const auto& other) { return one.first < other.first; });
  for (const auto& [turn, wait] : waits) image.waits.push_back(wait);
}

}  // namespace

RankImage RankBlocks::image() const {
  RankImage image;
  for (const Place& place : places_) {
    image.places.push_back({place.group_idx, place.medium, place.chunk});
  }
  ChainCopy chains(shared_.tree, labels_, image);
  LabelCopy copy(shared_.names, labels_.places(), image);
  copy_labels(labels_, chains, copy, image);
  copy_orphans(orphans_, chains, copy, image);
  for (const Label& label : torn_) image.torn.push_back(copy.label(label));
  image.groups = groups_.known();
  image.shapes.assign(groups_.shapes().begin(), groups_.shapes().end());
  image.skipped = counts_.skipped;
  image.counters.assign(counts_.counters.begin(), counts_.counters.end());
  image.ignored.assign(counts_.ignored.begin(), counts_.ignored.end());
  image.orphans_dropped = orphans_.dropped();
  image.orphans_forgotten = orphans_.forgot();
  image.ambiguous_count = labels_.ambiguous();
  image.duplicates = labels_.duplicates();
  image.unit = groups_.unit();
  image.settings = groups_.settings();
  image.positions_unknown = positions_unknown_;
  image.left_out = left_out_;
  image.removals_unknown = removals_unknown_;
  return image;
}

void RankBlocks::restore(const RankImage& image, const std::vector<const std::string*>& media) {
  std::vector<RootId> roots;
  for (const Namespace& root : image.roots) {
    roots.push_back(shared_.tree.enter(root.block_size, root.lookahead, root.lora));
  }
  for (size_t i = 0; i < image.places.size(); ++i) {
    const auto& [group_idx, medium, chunk] = image.places[i];
    const OwnerId owner =
        shared_.owners.make({slot_, group_idx, media[i], medium_tier(medium), chunk});
    places_.push_back({group_idx, medium, chunk, owner});
    labels_.places().push_back(owner);
  }
  const std::vector<BlockRef> blocks = restore_blocks(image, roots);
  restore_labels(image, blocks);
  restore_owners(image, blocks);
  restore_odd_copies(image, blocks);
  labels_.restore_counts(image.ambiguous_count, image.duplicates);
  restore_orphans(image, roots);
  for (const RootId root : roots) shared_.tree.leave(root);
  for (const WireHash& torn : image.torn) {
    const Label label = restored_label(image, torn);
    if (torn_.insert(label).second) shared_.names.acquire(label);
  }
  groups_.restore(image.groups, image.shapes, image.unit, image.settings);
  counts_.skipped = image.skipped;
  std::copy(image.counters.begin(), image.counters.end(), counts_.counters.begin());
  std::copy(image.ignored.begin(), image.ignored.end(), counts_.ignored.begin());
  // What a rank applied early is not in an image.
  early_ = image.unit == 0 && image.orphans.empty() ? std::make_unique<Early>(counts_) : nullptr;
  positions_unknown_ = image.positions_unknown;
  left_out_ = image.left_out;
  removals_unknown_ = image.removals_unknown;
  summarize();
}

// A label that must be acquired at once.
Label RankBlocks::restored_label(const RankImage& image, const WireHash& label) {
  if (!label.is_bytes()) return {label.value, false};
  return {shared_.names.number(image.name(label)), true};
}

std::vector<Copies> RankBlocks::restored_copies(const std::vector<CopiesImage>& copies) const {
  std::vector<Copies> all;
  for (const CopiesImage& some : copies) all.push_back({places_[some.place].owner, some.count});
  return all;
}

// Put the chains into the tree where they are missing; say which block is at which position.
std::vector<BlockRef> RankBlocks::restore_blocks(const RankImage& image,
                                                 const std::vector<RootId>& roots) {
  std::vector<BlockRef> blocks;
  blocks.reserve(image.keys.size());
  std::vector<Stretch>& stretches = shared_.scratch.chain;
  for (const ChainImage& chain : image.chains) {
    const bool starts = chain.parent == ChainImage::kStart;
    stretches.clear();
    shared_.tree.extend_keys(starts ? kNoBlock : blocks[image.position(chain)], roots[chain.root],
                             image.keys.data() + chain.first, chain.count, stretches,
                             chain.salted);
    for (const Stretch& stretch : stretches) {
      const BlockRef first = block_ref(stretch.strand, stretch.offset);
      for (uint32_t i = 0; i < stretch.count; ++i) blocks.push_back(first + i);
    }
  }
  return blocks;
}

void RankBlocks::restore_owners(const RankImage& image, const std::vector<BlockRef>& blocks) {
  uint32_t holding = 0;
  for (const ChainImage& chain : image.chains) {
    for (; holding < chain.holdings_end; ++holding) {
      const HoldingImage& held = image.holdings[holding];
      for (uint32_t i = 0; i < chain.count;) {
        const BlockRef* const first = &blocks[chain.first + i];
        uint32_t count = 0;  // of neighbours in one strand
        while (i + count < chain.count && (held.blocks >> (i + count) & 1) != 0 &&
               first[count] == *first + count && strand_of(first[count]) == strand_of(*first)) {
          ++count;
        }
        if (count != 0) {
          shared_.tree.own({strand_of(*first), offset_of(*first), count}, places_[held.place].owner);
        }
        i += std::max(count, 1u);
      }
    }
  }
}

void RankBlocks::restore_labels(const RankImage& image, const std::vector<BlockRef>& blocks) {
  size_t ints = 0;
  size_t named = 0;
  for (const WireHash& label : image.labels) {
    ints += !label.is_bytes();
    named += label.is_bytes() && label.length != RankImage::kUnlabelled.length;
  }
  labels_.reserve(ints + ints / 4, named + named / 4);  // as much room as tables have that grew
  shared_.names.reserve(named);
  std::unordered_map<uint32_t, uint64_t> odd;  // places by position
  for (const OddImage& some : image.odd) odd[some.position] = places_in(some.copies);
  uint32_t holdings = 0;
  for (const ChainImage& chain : image.chains) {
    const bool one_place = chain.holdings_end - holdings == 1;
    holdings = chain.holdings_end;
    for (uint32_t position = chain.first; position < chain.first + chain.count; ++position) {
      const WireHash& label = image.labels[position];
      if (label.length == RankImage::kUnlabelled.length) continue;
      const uint32_t ahead = std::min(position + kAhead, image.positions() - 1);
      if (image.labels[ahead].length == 0) labels_.prefetch({image.labels[ahead].value, false});
      const auto places = odd.empty() ? odd.end() : odd.find(position);
      const uint64_t groups =
          places != odd.end() ? image.groups_in(places->second)
                              : (one_place ? 1 : image.groups_in(image.places_of(position)));
      labels_.restore(restored_label(image, label), blocks[position], groups);
    }
  }
  for (const FurtherImage& some : image.further) {
    labels_.restore(restored_label(image, some.label), blocks[some.position],
                    image.groups_in(places_in(some.copies)));
  }
  for (const AmbiguousImage& some : image.ambiguous) {
    std::vector<BlockRef> oldest_first;
    for (const uint32_t position : some.positions) oldest_first.push_back(blocks[position]);
    labels_.restore_order(restored_label(image, some.label), oldest_first);
  }
}

void RankBlocks::restore_odd_copies(const RankImage& image, const std::vector<BlockRef>& blocks) {
  for (const FurtherImage& some : image.further) {
    labels_.restore_further(restored_label(image, some.label), blocks[some.position],
                            restored_copies(some.copies));
  }
  for (const OddImage& some : image.odd) {
    labels_.restore_copies(blocks[some.position], restored_copies(some.copies));
  }
  labels_.count_shared();
}

void RankBlocks::restore_orphans(const RankImage& image, const std::vector<RootId>& roots) {
  for (const OrphanImage& orphan : image.orphans) {
    orphans_.restore(restored_label(image, orphan.label), restored_copies(orphan.copies));
  }
  for (const WaitImage& wait : image.waits) {
    const Label label = restored_label(image, image.orphans[wait.orphan].label);
    orphans_.restore_wait(label, restored_label(image, wait.parent), roots[wait.root], wait.content,
                          wait.content_bytes);
  }
  orphans_.restore_dropped(image.orphans_dropped, image.orphans_forgotten);
}

}  // namespace kvindex
