// Strands: how the radix tree is stored.
//
// A strand is a chain of up to 64 blocks that never move: what names a block (`BlockRef`) stays
// right while other blocks come and go. Who holds which of them is kept beside, as segments of
// equal owners; where other strands begin, as branches. So a split of the radix tree is a line
// drawn in a strand, and costs nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/few.hpp"
#include "core/label_table.hpp"
#include "core/owner_sets.hpp"
#include "core/prefix_key.hpp"

namespace kvindex {

using StrandId = uint32_t;
using RootId = uint32_t;

inline constexpr unsigned kOffsetBits = 6;
inline constexpr unsigned kStrandBlocks = 1u << kOffsetBits;
inline constexpr StrandId kMostStrands = (1u << (32 - kOffsetBits)) - 1;
inline constexpr StrandId kNoStrand = 0xffffffffu;

inline BlockRef block_ref(StrandId strand, unsigned offset) {
  return strand << kOffsetBits | offset;
}
inline StrandId strand_of(BlockRef block) { return block >> kOffsetBits; }
inline unsigned offset_of(BlockRef block) { return block & (kStrandBlocks - 1); }

// Blocks up to `stop`, from where the segment before ends.
struct Segment {
  SetId owners = kNoOwners;
  uint32_t stop = 0;
};

// The strands that begin after a block: how many, and the oldest of them.
struct Branch {
  uint32_t children = 0;
  uint32_t offset : kOffsetBits = 0;
  uint32_t first : 32 - kOffsetBits = 0;
};

struct Strand {
  std::unique_ptr<Key[]> keys;
  Few<Segment> segments;
  Few<Branch> branches;  // by offset
  BlockRef parent = kNoBlock;  // kNoBlock: the strand starts its prompts
  RootId root = 0;
  uint32_t depth = 0;  // blocks before the first
  // Those that begin after the same block, in a circle from the oldest to the newest.
  StrandId older = kNoStrand;
  StrandId newer = kNoStrand;
  uint8_t count = 0;  // 0: not in use
  uint8_t capacity = 0;
  bool salted = false;  // its prompts start under a salt, or other extra keys

  // Make room for that many keys.
  void reserve(unsigned blocks);
  // Give back room that is no longer needed.
  void fit();
};

// All strands by their number, in chunks that are given back when nothing in them is in use.
class StrandPool {
 public:
  Strand& operator[](StrandId id) { return chunks_[id >> kChunkBits].strands[id & kChunkMask]; }
  const Strand& operator[](StrandId id) const {
    return chunks_[id >> kChunkBits].strands[id & kChunkMask];
  }

  // kNoStrand if all numbers are in use.
  StrandId make();
  void drop(StrandId id);

  size_t size() const { return size_; }
  size_t limit() const { return chunks_.size() << kChunkBits; }
  // Whether a strand has this number, which may be any.
  bool has(StrandId id) const {
    return id < limit() && chunks_[id >> kChunkBits].strands != nullptr && (*this)[id].count != 0;
  }

  template <class Visit>
  void for_each(Visit&& visit) const {
    for (size_t chunk = 0; chunk < chunks_.size(); ++chunk) {
      if (chunks_[chunk].strands == nullptr) continue;
      for (uint32_t i = 0; i <= kChunkMask; ++i) {
        const Strand& strand = chunks_[chunk].strands[i];
        if (strand.count != 0) visit(static_cast<StrandId>(chunk << kChunkBits | i), strand);
      }
    }
  }

 private:
  static constexpr unsigned kChunkBits = 8;
  static constexpr uint32_t kChunkMask = (1u << kChunkBits) - 1;

  struct Chunk {
    std::unique_ptr<Strand[]> strands;
    std::vector<uint8_t> free;
  };

  std::vector<Chunk> chunks_;
  std::vector<uint32_t> open_;  // chunks with something free, or not there
  size_t size_ = 0;
};

}  // namespace kvindex
