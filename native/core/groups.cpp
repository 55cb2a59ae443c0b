#include "core/groups.hpp"

#include <algorithm>
#include <limits>
#include <numeric>

namespace kvindex {

namespace {

constexpr size_t kMostGroups = 64;  // against a publisher that invents ever new ones

bool is_window(std::string_view kind) {
  return kind == "sliding_window" || kind == "sliding_window_mla";
}

}  // namespace

bool GroupSpec::valid() const { return !is_window(kind) || sliding_window.value_or(0) >= 1; }

bool GroupSpec::takes_part() const {
  return kind != "encoder_only_attention" && kind != "cross_attention";
}

std::optional<uint64_t> GroupSpec::needed_blocks(uint32_t block_size) const {
  if (is_window(kind)) {
    const uint64_t before = static_cast<uint64_t>(*sliding_window) - 1;
    return before / block_size + (before % block_size != 0);
  }
  if (kind == "mamba") return 1;  // the state at the cut stands for everything before it
  return std::nullopt;
}

std::optional<std::pair<uint32_t, const Group*>> RankGroups::main() const {
  std::optional<std::pair<uint32_t, const Group*>> main;
  for (const auto& [group_idx, group] : groups_) {
    if (!group.spec.takes_part()) continue;
    if (!main) main.emplace(group_idx, &group);
    if (!group.spec.needed_blocks(1)) return std::pair{group_idx, &group};
  }
  return main;
}

void RankGroups::configure(const std::map<uint32_t, GroupSpec>& specs) {
  for (const auto& [group_idx, spec] : specs) {
    Group& group = groups_[group_idx];
    group.spec = spec;
    group.configured = true;
  }
  changed();
}

void RankGroups::forget() {
  std::erase_if(groups_, [](const auto& entry) { return !entry.second.configured; });
  for (auto& [group_idx, group] : groups_) group.block_size = 0;
  shapes_.clear();
  changed();
}

void RankGroups::restore(const std::map<uint32_t, Group>& groups,
                         const std::vector<std::pair<uint32_t, uint32_t>>& shapes) {
  groups_ = groups;
  shapes_.insert(shapes.begin(), shapes.end());
  changed();
}

GroupFault RankGroups::learn(uint32_t group_idx, const GroupSpec* told, uint32_t block_size,
                             uint32_t lookahead) {
  auto found = groups_.find(group_idx);
  if (found == groups_.end()) {
    if (groups_.size() >= kMostGroups) return GroupFault::too_many_groups;
    found = groups_.emplace(group_idx, Group{}).first;
    changed();
  }
  Group& group = found->second;
  if (told != nullptr && !group.configured && group.spec != *told) {
    if (!told->valid()) return GroupFault::group_kind;
    group.spec = *told;
    changed();
  }
  if (block_size < group.block_size) return GroupFault::partial_block;
  const std::pair shape{block_size, lookahead};
  if (!shapes_.contains(shape)) {
    if (shapes_.size() >= kMostShapes) return GroupFault::too_many_block_sizes;
    shapes_.insert(shape);
  }
  if (group.block_size != block_size) {
    group.block_size = block_size;
    changed();
  }
  last_shape_ = {group_idx, block_size, lookahead};
  return GroupFault::none;
}

void RankGroups::changed() {
  size_t taking_part = 0;
  last_shape_ = Shape{};
  window_only_.clear();
  only_full_ = Only{};
  std::set<uint32_t> full_sizes;
  for (const auto& [group_idx, group] : groups_) {
    if (!group.spec.takes_part()) continue;
    ++taking_part;
    if (group.spec.needed_blocks(1)) {
      window_only_.insert(group.block_size);
    } else {
      full_sizes.insert(group.block_size);
      only_full_ = {group_idx, group.block_size};
    }
  }
  for (const uint32_t size : full_sizes) window_only_.erase(size);
  if (taking_part != 1) only_full_ = Only{};
}

void extend_spans(Spans& spans, uint32_t start, uint32_t stop) {
  if (!spans.empty() && spans.back().second >= start) {
    spans.back().second = std::max(stop, spans.back().second);
  } else {
    spans.emplace_back(start, stop);
  }
}

namespace {

// How many tokens are resident from the start.
uint64_t leading(const GroupCoverage& group) {
  if (group.spans.empty() || group.spans.front().first != 0) return 0;
  return uint64_t{group.spans.front().second} * group.block_size;
}

// Where the last resident block ends, in tokens.
uint64_t reach(const GroupCoverage& group) {
  return group.spans.empty() ? 0 : uint64_t{group.spans.back().second} * group.block_size;
}

// Whether the blocks that a window needs before `hit` tokens are all resident.
bool fits(const GroupCoverage& group, uint64_t hit) {
  const uint64_t stop = hit / group.block_size;
  const uint64_t needed = *group.spec->needed_blocks(group.block_size);
  const uint64_t start = stop > needed ? stop - needed : 0;
  if (start == stop) return true;
  const auto after = std::upper_bound(
      group.spans.begin(), group.spans.end(), start,
      [](uint64_t value, const auto& span) { return value < span.first; });
  return after != group.spans.begin() && stop <= (after - 1)->second;
}

// The least common multiple of the block sizes, or more than any prompt has.
uint64_t common_unit(const std::vector<GroupCoverage>& groups) {
  uint64_t unit = 1;
  for (const GroupCoverage& group : groups) {
    const uint64_t factor = group.block_size / std::gcd(unit, uint64_t{group.block_size});
    if (unit > (uint64_t{1} << 62) / factor) return std::numeric_limits<uint64_t>::max();
    unit *= factor;
  }
  return unit;
}

}  // namespace

uint64_t engine_hit(const std::vector<GroupCoverage>& groups) {
  if (groups.empty()) return 0;
  std::vector<const GroupCoverage*> windows;
  uint64_t full_hit = std::numeric_limits<uint64_t>::max();
  uint64_t window_hit = full_hit;
  for (const GroupCoverage& group : groups) {
    if (group.spec->needed_blocks(group.block_size)) {
      windows.push_back(&group);
      window_hit = std::min(window_hit, reach(group));
    } else {
      full_hit = std::min(full_hit, leading(group));
    }
  }
  uint64_t hit = windows.size() == groups.size() ? window_hit : full_hit;
  const uint64_t unit = common_unit(groups);
  hit -= hit % unit;
  const auto all_fit = [&] {
    return std::all_of(windows.begin(), windows.end(),
                       [&](const GroupCoverage* group) { return fits(*group, hit); });
  };
  while (hit != 0 && !all_fit()) hit -= unit;
  return hit;
}

}  // namespace kvindex
