#include "core/engine_hit.hpp"

#include <algorithm>
#include <optional>

namespace kvindex {

uint64_t GroupSpec::needed_from(uint64_t cut, uint64_t block_size) const {
  uint64_t needed = cut;
  if (has_window()) {
    const uint64_t blocks = window_blocks(block_size);
    needed = blocks > cut / block_size ? cut : blocks * block_size;
  } else if (is_mamba()) {
    needed = block_size;
  } else if (is_chunked()) {
    needed = cut % static_cast<uint64_t>(*attention_chunk_size);
  }
  return cut - std::min(needed, cut);
}

void extend_spans(Spans& spans, uint32_t start, uint32_t stop) {
  if (!spans.empty() && spans.back().second >= start) {
    spans.back().second = std::max(stop, spans.back().second);
  } else {
    spans.emplace_back(start, stop);
  }
}

namespace {

constexpr uint64_t floor_to(uint64_t value, uint64_t step) { return value - value % step; }

// One group's search for hits.
class Search {
 public:
  Search(const Cache& cache, const GroupCoverage& group)
      : cache_(cache), group_(group), size_(group.block_size) {}

  // The longest hit within `length` tokens that the group can serve.
  uint64_t find(uint64_t length, bool drop) const {
    if (group_.spec->is_mamba()) return find_state(length);
    if (group_.spec->has_window()) return find_window(length, drop);
    if (group_.spec->is_chunked()) return find_chunk(length);
    return find_all(length, drop);
  }

 private:
  uint64_t find_all(uint64_t length, bool drop) const {
    uint64_t hit = reach(0, length);
    if (cache_.alignment < size_) {  // a hit may end within a block, where an entry of its own says so
      const uint64_t last =
          std::min(hit + size_ - cache_.alignment, floor_to(length, cache_.alignment));
      for (uint64_t stop = last; stop > hit; stop -= cache_.alignment) {
        if (!holds(stop)) continue;
        hit = stop;
        break;
      }
    }
    if (drop && hit != 0) hit -= std::min(cache_.alignment, size_);
    return floor_to(hit, cache_.alignment);
  }

  uint64_t find_window(uint64_t length, bool drop) const {
    const uint64_t needed = group_.spec->window_blocks(size_) + drop;
    uint64_t count = 0;  // blocks in a row, from right to left
    std::optional<uint64_t> hit;
    for (uint64_t block = length / size_; block-- != 0;) {
      if (!holds((block + 1) * size_)) {
        count = 0;
        block = skip_hole(block);
        continue;
      }
      if (count == 0 && (block + !drop) * size_ % cache_.alignment != 0) continue;
      if (++count < needed) continue;
      hit = (block + count) * size_;
      break;
    }
    if (!hit) hit = floor_to(count * size_, cache_.alignment);  // too few, but from the start
    if (drop && *hit != 0) *hit -= size_;
    return floor_to(*hit, cache_.alignment);
  }

  // The lowest block of the hole that a block is in.
  uint64_t skip_hole(uint64_t block) const {
    const uint64_t unit = (block + 1) * size_ / cache_.unit - 1;
    const auto after = after_unit(unit);
    if (after == group_.spans.begin()) return 0;
    const uint64_t stop = (after - 1)->second;  // no unit from here to `unit` is held
    return stop * cache_.unit / size_;
  }

  uint64_t find_chunk(uint64_t length) const {
    const auto chunk = static_cast<uint64_t>(*group_.spec->attention_chunk_size);
    return reach(floor_to(floor_to(length, chunk), size_), length);
  }

  uint64_t find_state(uint64_t length) const {
    const uint64_t step = std::min(size_, cache_.alignment);
    for (uint64_t stop = floor_to(length, step); stop != 0; stop -= step) {
      if (stop % cache_.alignment == 0 && holds(stop)) return stop;
    }
    return 0;
  }

  // Up to which token the group holds all blocks from a block's start on.
  uint64_t reach(uint64_t start, uint64_t length) const {
    if (size_ == cache_.unit) {
      const auto after = after_unit(start / size_);
      if (after == group_.spans.begin()) return start;
      return std::max(start, std::min((after - 1)->second * size_, floor_to(length, size_)));
    }
    while (start + size_ <= length && holds(start + size_)) start += size_;
    return start;
  }

  // Whether the group holds the block that ends after `stop` tokens.
  bool holds(uint64_t stop) const {
    const uint64_t unit = stop / cache_.unit - 1;
    const auto after = after_unit(unit);
    return after != group_.spans.begin() && unit < (after - 1)->second;
  }

  Spans::const_iterator after_unit(uint64_t unit) const {
    return std::upper_bound(
        group_.spans.begin(), group_.spans.end(), unit,
        [](uint64_t value, const auto& span) { return value < span.first; });
  }

  const Cache& cache_;
  const GroupCoverage& group_;
  const uint64_t size_;
};

uint64_t engine_hit(const Cache& cache, uint64_t length, const std::vector<GroupCoverage>& all) {
  if (all.empty()) return 0;
  if (all.size() == 1) return Search(cache, all[0]).find(length, all[0].eagle);
  std::vector<const GroupCoverage*> groups;
  for (const GroupCoverage& group : all) groups.push_back(&group);
  std::stable_partition(groups.begin(), groups.end(),
                        [](const GroupCoverage* group) { return group->spec->needs_all(); });
  const bool one_round = groups.size() == 2 && groups[0]->spec->needs_all();
  std::vector<std::optional<uint64_t>> reached(groups.size());
  std::vector<bool> dropped(groups.size());
  for (uint64_t hit = length;;) {
    uint64_t current = hit;
    for (size_t number = 0; number < groups.size(); ++number) {
      const GroupCoverage& group = *groups[number];
      if (reached[number]) {
        current = std::min(current, *reached[number]);
        continue;
      }
      const bool drop = group.eagle && !dropped[number];
      uint64_t limit = current;
      if (drop && !group.spec->is_mamba()) {  // the block that is dropped may lie beyond
        const uint64_t margin = std::min(cache.alignment, group.block_size);
        limit = std::min(current + margin, floor_to(length, cache.unit));
      }
      const uint64_t found = Search(cache, group).find(limit, drop);
      if (drop) {
        dropped[number] = true;
      } else if (found < current) {
        dropped.assign(dropped.size(), false);
      }
      current = found;
      if (group.spec->needs_all()) reached[number] = found;
    }
    if (one_round || current >= hit) return current;
    hit = current;
  }
}

// The part of some spans before a cut, and of others after it.
Spans joined(const Spans& before, uint32_t cut, const Spans& after) {
  Spans all;
  for (const auto& [start, stop] : before) {
    if (start < cut) extend_spans(all, start, std::min(stop, cut));
  }
  for (const auto& [start, stop] : after) {
    if (stop > cut) extend_spans(all, std::max(start, cut), stop);
  }
  return all;
}

}  // namespace

TieredHit tiered_hit(const Cache& cache, uint64_t length, const Tiers& tiers) {
  TieredHit hit;
  std::vector<GroupCoverage> path;
  for (size_t tier = 0; tier < tiers.size(); ++tier) {
    if (tiers[tier].empty()) continue;
    if (path.empty()) {
      path = tiers[tier];
    } else {
      const auto cut = static_cast<uint32_t>(hit.tokens / cache.unit);
      for (size_t i = 0; i < path.size(); ++i) {
        path[i].spans = joined(path[i].spans, cut, tiers[tier][i].spans);
      }
    }
    hit.tokens = std::max(hit.tokens, engine_hit(cache, length, path));
    if (tier == kDeviceTier) hit.device_tokens = hit.tokens;
    if (tier <= kHostTier) hit.host_tokens = hit.tokens;
  }
  const uint64_t least = hit.device_tokens + cache.offload_chunk;
  if (hit.tokens < least) hit.tokens = hit.device_tokens;
  if (hit.host_tokens < least) hit.host_tokens = hit.device_tokens;
  return hit;
}

}  // namespace kvindex
