// KV cache groups of a rank, and the hit that the engine itself would get.
//
// The Python twins are kvindex/index/rank_groups.py, kvindex/index/groups.py and
// kvindex/wire/group_spec.py.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kvindex {

struct GroupSpec {
  std::string kind = "full_attention";
  std::optional<int64_t> sliding_window;

  bool operator==(const GroupSpec&) const = default;

  // Whether a sliding-window kind has a window.
  bool valid() const;
  // Whether prefix caching concerns the group at all.
  bool takes_part() const;
  // How many blocks before the cut must be resident; none means all of them.
  std::optional<uint64_t> needed_blocks(uint32_t block_size) const;
};

struct Group {
  GroupSpec spec;
  bool configured = false;
  uint32_t block_size = 0;  // 0 until a block is stored
};

enum class GroupFault : uint8_t {
  none, too_many_groups, group_kind, partial_block, too_many_block_sizes
};

class RankGroups {
 public:
  // Bound against a publisher that invents ever new ones: each namespace costs every query a walk.
  static constexpr size_t kMostShapes = 16;

  const std::map<uint32_t, Group>& known() const { return groups_; }

  // The group whose blocks an answer counts, and its index: the first that needs all blocks before
  // the cut, else the first that takes part at all.
  std::optional<std::pair<uint32_t, const Group*>> main() const;

  // The block sizes of which no group needs all blocks before the cut: in a walk over blocks of
  // such a size, a match may skip a hole.
  const std::set<uint32_t>& window_only() const { return window_only_; }
  // The usual case: one group takes part and needs all blocks before the cut. Then `group_idx` and
  // `block_size` are its; else `block_size` is 0.
  struct Only {
    uint32_t group_idx = 0;
    uint32_t block_size = 0;
  };
  const Only& only_full() const { return only_full_; }

  // Whether a store of the group would teach nothing.
  bool knows(uint32_t group_idx, uint32_t block_size, uint32_t lookahead) const {
    return last_shape_ == Shape{group_idx, block_size, lookahead};
  }

  void configure(const std::map<uint32_t, GroupSpec>& specs);
  void forget();
  // Take over what another index knew; nothing must be known yet.
  void restore(const std::map<uint32_t, Group>& groups,
               const std::vector<std::pair<uint32_t, uint32_t>>& shapes);
  const std::set<std::pair<uint32_t, uint32_t>>& shapes() const { return shapes_; }
  GroupFault learn(uint32_t group_idx, const GroupSpec* told, uint32_t block_size,
                   uint32_t lookahead);

 private:
  struct Shape {
    uint32_t group_idx = 0;
    uint32_t block_size = 0;
    uint32_t lookahead = 0;
    bool operator==(const Shape&) const = default;
  };

  void changed();

  std::map<uint32_t, Group> groups_;
  std::set<std::pair<uint32_t, uint32_t>> shapes_;  // (block size, lookahead)
  std::set<uint32_t> window_only_;
  Only only_full_;
  Shape last_shape_;  // of the last store that was taken; block size 0 if it may not be any more
};

// Resident stretches [start, stop) of a prompt's blocks, ascending and not touching.
using Spans = std::vector<std::pair<uint32_t, uint32_t>>;

// Add [start, stop) to spans whose last one does not reach beyond it.
void extend_spans(Spans& spans, uint32_t start, uint32_t stop);

// What one rank holds of a prompt in one group.
struct GroupCoverage {
  const GroupSpec* spec = nullptr;
  uint32_t block_size = 1;
  Spans spans;
};

// How many leading tokens of the prompt the engine would find cached; all groups take part.
uint64_t engine_hit(const std::vector<GroupCoverage>& groups);

}  // namespace kvindex
