#include "core/groups.hpp"

#include <algorithm>
#include <limits>
#include <numeric>

namespace kvindex {

namespace {

constexpr size_t kMostGroups = 64;  // against a publisher that invents ever new ones

bool is_hashed(const Group& group) { return group.spec.takes_part() && group.block_size != 0; }

}  // namespace

void RankGroups::configure(const CacheSettings& settings) {
  settings_ = settings;
  for (auto& [group_idx, group] : groups_) {
    if (!group.configured || settings.groups.contains(group_idx)) continue;
    group.spec = GroupSpec();  // the wire may tell again
    group.configured = group.kind_known = false;
  }
  for (const auto& [group_idx, spec] : settings.groups) {
    Group& group = groups_[group_idx];
    group.spec = spec;
    group.configured = group.kind_known = true;
  }
  changed();
}

void RankGroups::forget() {
  groups_.clear();
  shapes_.clear();
  unit_ = 0;
  configure(CacheSettings(settings_));
}

void RankGroups::restore(const std::map<uint32_t, Group>& groups,
                         const std::vector<std::pair<uint32_t, uint32_t>>& shapes, uint32_t unit,
                         const CacheSettings& settings) {
  groups_ = groups;
  shapes_.insert(shapes.begin(), shapes.end());
  unit_ = unit;
  settings_ = settings;
  changed();
}

void RankGroups::learn_size(uint32_t group_idx, uint32_t block_size, bool on_device) {
  auto found = groups_.find(group_idx);
  if (found == groups_.end()) {
    if (groups_.size() >= kMostGroups) return;
    found = groups_.emplace(group_idx, Group{}).first;
  }
  Group& group = found->second;
  const bool is_sure = group.block_size == block_size && !group.size_off_device;
  if (group.block_size != 0 && (!on_device || is_sure)) return;
  const uint32_t known = group.size_off_device ? 0 : group.block_size;
  group.size_off_device = !on_device;
  const bool alone = std::all_of(groups_.begin(), groups_.end(), [&](const auto& entry) {
    return &entry.second == &group || entry.second.block_size == 0;
  });
  group.block_size = std::max(known, block_size);
  unit_ = alone ? std::gcd(group.block_size, settings_.hash_block_size)
                : std::gcd(unit_, block_size);
  changed();
}

bool RankGroups::knows_device_size() const {
  return std::any_of(groups_.begin(), groups_.end(), [](const auto& entry) {
    return entry.second.block_size != 0 && !entry.second.size_off_device;
  });
}

uint32_t RankGroups::chunk_of(uint32_t group_idx, uint32_t block_size, uint8_t tier) const {
  if (tier == kDeviceTier) return 0;
  if (block_size == 0) return settings_.offload_chunk;
  const auto group = groups_.find(group_idx);
  const bool is_usual = group != groups_.end() && !group->second.size_off_device &&
                        block_size <= group->second.block_size;
  return is_usual ? 0 : block_size;
}

Spans RankGroups::whole_chunks(Spans spans, uint32_t group_idx, uint32_t chunk) const {
  const auto whole = units_in(static_cast<uint32_t>(summary_.cache.offload_chunk));
  const auto group = groups_.find(group_idx);
  if (whole > 1 && chunk == 0 && group != groups_.end()) chunk = group->second.block_size;
  const uint32_t before = units_in(chunk) - 1;
  if (before == 0 && whole == 1) return spans;
  Spans covered;
  for (const auto& [start, stop] : spans) {
    const uint32_t first = start - std::min(start, before);
    // A chunk may begin before the one that ends before it.
    while (!covered.empty() && covered.back().first >= first) covered.pop_back();
    extend_spans(covered, first, stop);
  }
  Spans counted;
  for (const auto& [start, stop] : covered) {
    const uint32_t first = start + (whole - start % whole) % whole;
    const uint32_t last = stop - stop % whole;
    if (first < last) counted.emplace_back(first, last);
  }
  return counted;
}

GroupFault RankGroups::learn(uint32_t group_idx, const GroupSpec* reported, uint32_t block_size,
                             uint32_t lookahead) {
  const auto found = groups_.find(group_idx);
  if (found == groups_.end()) return GroupFault::too_many_groups;
  Group& group = found->second;
  if (reported != nullptr && !group.configured &&
      (!group.kind_known || group.spec.kind != reported->kind ||
       group.spec.sliding_window != reported->sliding_window)) {
    if (!reported->valid()) return GroupFault::group_kind;
    group.spec = *reported;
    group.kind_known = true;
    changed();
  }
  if (block_size % unit_ != 0) return GroupFault::partial_block;
  const std::pair shape{unit_, lookahead};
  if (!shapes_.contains(shape)) {
    if (shapes_.size() >= kMostShapes) return GroupFault::too_many_block_sizes;
    shapes_.insert(shape);
  }
  // A partial or an offloaded block may still be followed by one that teaches the group's size.
  if (group.block_size == block_size && !group.size_off_device) {
    last_shape_ = {group_idx, block_size, lookahead};
  }
  return GroupFault::none;
}

// Tokens whose multiples an engine's hits are; more than any prompt has if there are none.
uint64_t RankGroups::alignment() const {
  bool any_fine = false;
  bool all_fine = true;
  uint64_t common = 1;
  for (const auto& [group_idx, group] : groups_) {
    if (!is_hashed(group)) continue;
    any_fine |= group.spec.is_mamba() && group.block_size > unit_;
    all_fine &= group.spec.is_mamba() || group.spec.needs_all() || group.block_size == unit_;
    const uint64_t factor = group.block_size / std::gcd(common, uint64_t{group.block_size});
    if (common > (uint64_t{1} << 62) / factor) common = std::numeric_limits<uint64_t>::max();
    if (common != std::numeric_limits<uint64_t>::max()) common *= factor;
  }
  return any_fine && all_fine ? unit_ : common;
}

void RankGroups::changed() {
  last_shape_ = Shape{};
  summary_ = Summary{};
  bool all_known = true;
  bool any_known = false;
  bool known_dense = false;
  bool dense = false;
  bool all_units = true;
  bool main_needs_all = false;
  for (const auto& [group_idx, group] : groups_) {
    if (!is_hashed(group)) continue;
    ++summary_.hashed;
    if (summary_.main_size == 0 || (group.spec.needs_all() && !main_needs_all)) {
      summary_.main_size = group.block_size;
      main_needs_all = group.spec.needs_all();
    }
    all_known &= group.kind_known;
    any_known |= group.kind_known;
    known_dense |= group.kind_known && group.spec.needs_all();
    all_units &= group.block_size == unit_;
    if (group.spec.needs_all() && group.block_size == unit_) {
      dense = true;
      summary_.only_group = group_idx;
      summary_.only_size = unit_;
    }
  }
  summary_.windows_only = any_known && !known_dense;
  const bool has_chunks = units_in(settings_.offload_chunk) > 1;
  summary_.cache = {std::max(1u, unit_), alignment(), has_chunks ? settings_.offload_chunk : 0};
  summary_.kinds_unknown = summary_.hashed > 1 && !all_known;
  summary_.upper_bound =
      settings_.upper_bound || settings_.reports_full || summary_.kinds_unknown;
  // Where kinds are unknown, any group may turn out to be the one that counts; and the block that
  // EAGLE drops reaches further in groups of larger blocks.
  const bool any_may_count =
      summary_.kinds_unknown || settings_.eagle || !settings_.eagle_groups.empty();
  summary_.may_skip_holes = summary_.hashed != 0 && (!dense || (any_may_count && !all_units));
  bool any_eagle = false;
  for (auto& [group_idx, group] : groups_) {
    group.eagle = settings_.eagle || is_set_to_eagle(group);
    any_eagle |= group.eagle;
  }
  if (summary_.hashed != 1 || any_eagle) summary_.only_size = 0;
}

// Whether a group, or one that an engine looks up together with it, is set to drop its last block.
bool RankGroups::is_set_to_eagle(const Group& group) const {
  return std::any_of(settings_.eagle_groups.begin(), settings_.eagle_groups.end(),
                     [&](uint32_t group_idx) {
                       const auto other = groups_.find(group_idx);
                       return other != groups_.end() && other->second.spec == group.spec &&
                              other->second.block_size == group.block_size;
                     });
}

}  // namespace kvindex
