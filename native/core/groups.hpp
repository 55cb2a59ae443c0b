// What is known of a rank's KV cache groups: their kinds, their block sizes, the tree's unit.
//
// The Python twin, kvindex/index/reference/groups.py, says why each rule is as it is.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/engine_hit.hpp"
#include "core/group_spec.hpp"

namespace kvindex {

struct Group {
  GroupSpec spec;
  bool configured = false;
  bool kind_known = false;  // by an event or by the settings
  uint32_t block_size = 0;  // 0 until a block is stored
  bool size_off_device = false;  // that of a store off the device, which may be of several blocks
  bool eagle = false;       // whether EAGLE drops the last block matched; follows from the settings
};

enum class GroupFault : uint8_t {
  none, too_many_groups, group_kind, partial_block, too_many_block_sizes
};

class RankGroups {
 public:
  // Bound against a publisher that invents ever new ones: each namespace costs every query a walk.
  static constexpr size_t kMostShapes = 16;

  const std::map<uint32_t, Group>& known() const { return groups_; }
  const CacheSettings& settings() const { return settings_; }
  // Tokens per block of the tree; 0 until a block is stored.
  uint32_t unit() const { return unit_; }

  // What follows from all that is known; made anew when that changes.
  struct Summary {
    Cache cache;
    uint32_t hashed = 0;          // groups that take part and have stored a block
    bool kinds_unknown = false;   // there are several of which some may be anything
    bool upper_bound = false;     // the engine's hits may be shorter than the answers
    bool may_skip_holes = false;  // a match may go on after a unit that no group holds
    // No group needs all blocks, of those whose kinds are known: then no event may name all of them.
    bool windows_only = false;
    // The usual case: one group takes part, and its blocks, of one unit, are all needed. Then it is
    // `only_group`, and `only_size` its block size; else `only_size` is 0.
    uint32_t only_group = 0;
    uint32_t only_size = 0;
    uint32_t main_size = 0;  // block size of the group whose blocks an answer counts, or 0
  };
  const Summary& summary() const { return summary_; }

  void configure(const CacheSettings& settings);
  void forget();
  // Take over what another index knew; nothing must be known yet.
  void restore(const std::map<uint32_t, Group>& groups,
               const std::vector<std::pair<uint32_t, uint32_t>>& shapes, uint32_t unit,
               const CacheSettings& settings);
  const std::set<std::pair<uint32_t, uint32_t>>& shapes() const { return shapes_; }

  // Learn a group's block size, and what it makes of the unit. A store of offloaded blocks, which
  // may be larger, teaches nothing of a known group; what it taught yields to the device's size.
  void learn_size(uint32_t group_idx, uint32_t block_size, bool on_device);
  // Whether a store on the device has shown a group's block size.
  bool knows_device_size() const;
  // The `Owner::chunk` of what a store on a tier names.
  uint32_t chunk_of(uint32_t group_idx, uint32_t block_size, uint8_t tier) const;
  // How many units a chunk has; 1 if it has no whole number of them.
  uint32_t units_in(uint32_t tokens) const {
    return tokens != 0 && unit_ != 0 && tokens % unit_ == 0 ? tokens / unit_ : 1;
  }
  // The units that count where an owner off the device has labels at these units.
  Spans whole_chunks(Spans spans, uint32_t group_idx, uint32_t chunk) const;
  // Whether a store of the group would teach nothing.
  bool knows(uint32_t group_idx, uint32_t block_size, uint32_t lookahead) const {
    return last_shape_ == Shape{group_idx, block_size, lookahead};
  }
  GroupFault learn(uint32_t group_idx, const GroupSpec* reported, uint32_t block_size,
                   uint32_t lookahead);

 private:
  struct Shape {
    uint32_t group_idx = 0;
    uint32_t block_size = 0;
    uint32_t lookahead = 0;
    bool operator==(const Shape&) const = default;
  };

  void changed();
  uint64_t alignment() const;
  bool is_set_to_eagle(const Group& group) const;

  std::map<uint32_t, Group> groups_;
  std::set<std::pair<uint32_t, uint32_t>> shapes_;  // (unit, lookahead)
  CacheSettings settings_;
  uint32_t unit_ = 0;
  Summary summary_;
  Shape last_shape_;  // of the last store that was taken; block size 0 if it may not be any more
};

}  // namespace kvindex
