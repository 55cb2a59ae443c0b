// The hit that the engine itself would get, from what each of its KV cache groups holds.
//
// The Python twin, kvindex/index/reference/matching.py, says where the rules come from.
#pragma once

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/group_spec.hpp"

namespace kvindex {

// Resident stretches [start, stop) of a prompt's units, ascending and not touching.
using Spans = std::vector<std::pair<uint32_t, uint32_t>>;

// Add [start, stop) to spans whose last one does not reach beyond it.
void extend_spans(Spans& spans, uint32_t start, uint32_t stop);

// What all groups of a rank have in common.
struct Cache {
  uint64_t unit = 1;       // tokens per block of the tree
  uint64_t alignment = 1;  // tokens whose multiples the hits are
  // Tokens that the engine loads together, and no fewer, from beyond its device; 0: any blocks.
  uint64_t offload_chunk = 0;
};

// What one rank holds of a prompt in one group.
struct GroupCoverage {
  const GroupSpec* spec = nullptr;
  uint64_t block_size = 1;
  Spans spans;
  bool eagle = false;  // whether the engine drops the last block that it matched there
};

// How far media are from the device: itself, the host, storage, and what nobody knows.
constexpr size_t kTiers = 4;
constexpr size_t kDeviceTier = 0;
constexpr size_t kHostTier = 1;
using Tiers = std::array<std::vector<GroupCoverage>, kTiers>;

struct TieredHit {
  uint64_t tokens = 0;
  uint64_t device_tokens = 0;  // those that the device holds by itself
  uint64_t host_tokens = 0;    // those that the device and the host hold together
};

// How many leading tokens of a prompt of `length` the engine holds; tiers without any groups count
// for nothing, the others have the same groups.
TieredHit tiered_hit(const Cache& cache, uint64_t length, const Tiers& tiers);

}  // namespace kvindex
