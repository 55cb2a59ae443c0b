// What a rank holds, as plain values that refer to no index: the form in which it is dumped.
//
// Blocks are named by their position: the chains' blocks one after the other.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/batch.hpp"
#include "core/groups.hpp"
#include "core/prefix_key.hpp"
#include "core/tree.hpp"

namespace kvindex {

// Thrown for bytes that are no image, or whose image could not be.
class ImageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct PlaceImage {
  uint32_t group_idx = 0;
  std::string medium;
  uint32_t chunk = 0;  // as `Owner::chunk`

  bool operator==(const PlaceImage&) const = default;
};

struct CopiesImage {
  uint32_t place = 0;
  uint64_t count = 0;

  bool operator==(const CopiesImage&) const = default;
};

// Consecutive blocks, at most as many as a strand has.
struct ChainImage {
  static constexpr uint32_t kStart = 0xffffffffu;

  uint32_t parent = kStart;  // the chain that it follows; kStart: none, it starts its prompts
  uint32_t offset = 0;       // the block in there
  uint32_t root = 0;         // its namespace
  bool salted = false;       // its prompts start under a salt; said where it starts them
  uint32_t first = 0;        // position of its first block
  uint32_t count = 0;
  uint32_t holdings_end = 0;  // its holdings are in `RankImage::holdings`, from where those before end
};

// Which blocks of a chain are held in a place, as bits.
struct HoldingImage {
  uint32_t place = 0;
  uint64_t blocks = 0;
};

// A block's copies under its first label.
struct OddImage {
  uint32_t position = 0;
  std::vector<CopiesImage> copies;
};

// A block's further label, and its copies under that.
struct FurtherImage {
  uint32_t position = 0;
  WireHash label;
  std::vector<CopiesImage> copies;
};

// A label of several blocks, from the oldest to the newest.
struct AmbiguousImage {
  WireHash label;
  std::vector<uint32_t> positions;
};

struct OrphanImage {
  WireHash label;
  std::vector<CopiesImage> copies;
};

// What an orphan waits for.
struct WaitImage {
  uint32_t orphan = 0;
  WireHash parent;
  uint32_t root = 0;
  Digest content;
  uint64_t content_bytes = 0;
};

struct RankImage {
  // The first labels of blocks that have none.
  static constexpr WireHash kUnlabelled{0, 0xffffffffu};

  std::string text;  // of labels that are bytes: as in a `Batch`
  std::vector<Namespace> roots;
  std::vector<PlaceImage> places;
  std::vector<ChainImage> chains;  // parents first
  std::vector<Key> keys;           // by position
  std::vector<HoldingImage> holdings;
  std::vector<WireHash> labels;    // by position: each held block's first one
  std::vector<OddImage> odd;         // where there are other copies than one in each place
  std::vector<FurtherImage> further;
  std::vector<AmbiguousImage> ambiguous;
  std::vector<OrphanImage> orphans;  // the oldest first
  std::vector<WaitImage> waits;      // in the order in which they wait
  std::map<uint32_t, Group> groups;
  std::vector<std::pair<uint32_t, uint32_t>> shapes;  // (block size, lookahead) that were stored
  std::vector<WireHash> torn;
  std::map<std::string, uint64_t> skipped;
  std::vector<uint64_t> counters;  // by `Counter`
  std::vector<uint64_t> ignored;   // by `Ignored`
  uint64_t orphans_dropped = 0;
  bool orphans_forgotten = false;
  uint64_t ambiguous_count = 0;
  uint64_t duplicates = 0;
  uint32_t unit = 0;
  CacheSettings settings;  // its groups are the configured ones of `groups`
  bool positions_unknown = false;
  bool left_out = false;
  bool removals_unknown = false;

  uint32_t positions() const { return static_cast<uint32_t>(keys.size()); }
  uint32_t position(const ChainImage& chain) const { return chains[chain.parent].first + chain.offset; }
  std::string_view name(const WireHash& label) const {
    return std::string_view(text).substr(label.value, label.length);
  }
  bool same(const WireHash& one, const WireHash& other) const {
    return one.is_bytes() == other.is_bytes() &&
           (one.is_bytes() ? name(one) == name(other) : one.value == other.value);
  }
  // The places that hold a block, as bits.
  uint64_t places_of(uint32_t position) const;
  // How many groups some places belong to.
  uint64_t groups_in(uint64_t places) const;
  // The resident (block, group) pairs.
  uint64_t resident() const;

  // Assert everything that an index relies on when it takes an image. Throws ImageError.
  // O(blocks + chains × log chains).
  void check() const;
};

inline uint64_t places_in(const std::vector<CopiesImage>& copies) {
  uint64_t places = 0;
  for (const CopiesImage& some : copies) places |= uint64_t{1} << some.place;
  return places;
}

}  // namespace kvindex
