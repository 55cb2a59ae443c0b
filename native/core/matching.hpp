// One walk for all ranks: from a prompt's keys to what each rank holds of it.
//
// The Python twin is kvindex/index/reference/matching.py.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/owners.hpp"
#include "core/prompt.hpp"
#include "core/rank_blocks.hpp"
#include "core/tree.hpp"

namespace kvindex {

struct Query {
  TokenView tokens;
  std::string lora;
  std::vector<std::string> extras;                 // canonical extra keys by block
  std::optional<std::vector<std::string>> media;   // folded names that count; none: all
  std::optional<std::vector<uint32_t>> ranks;      // their ids; none: all
  uint32_t block_size = 0;                         // 0: any
};

struct MediumBlocks {
  const std::string* medium = nullptr;  // lives as long as the index
  uint32_t blocks = 0;
};

// There is one for each rank that holds anything: 48 bytes, not more.
struct FoundRank {
  uint32_t rank = 0;  // its id
  uint32_t block_size = 0;
  uint64_t tokens = 0;
  uint64_t device_tokens = 0;  // of `tokens`, those that the device holds by itself
  uint64_t host_tokens = 0;    // likewise, the device and the host together
  uint32_t media_begin = 0;    // in Answer::media
  uint32_t media_count = 0;
  uint32_t order = 0;        // the rank's place in the index's order of ranks
  bool upper_bound = false;  // the engine's own hit may be shorter
  bool lower_bound = false;  // likewise longer

  uint32_t blocks() const { return static_cast<uint32_t>(tokens / block_size); }
};

// What the ranks that hold anything of a prompt hold of it.
struct Answer {
  std::vector<FoundRank> ranks;  // in no order
  std::shared_ptr<const RankSizes> sizes;  // of every rank, asked for or not
  std::vector<MediumBlocks> media;
  int64_t best = -1;  // of `ranks`: most tokens, then the first in the index's order of ranks
  bool starved = false;  // more ready tokens might give a longer match
};

// A rank as matching sees it.
struct RankSlot {
  std::unique_ptr<RankBlocks> blocks;  // null: not in use
  uint32_t id = 0;
  uint32_t order = 0;
  bool changing = false;  // a change of it is not done, and lets others go first
};

// Answer a query. Reads the shared state only; scratch memory is the thread's own.
void find_matches(const Shared& shared, const std::vector<RankSlot>& ranks, const Query& query,
                  Answer& answer);

// Which of a prompt's blocks a rank holds in one group on one medium.
struct Holding {
  uint32_t rank = 0;  // its id
  uint32_t group_idx = 0;
  std::string medium;
  uint32_t block_size = 0;
  uint32_t lookahead = 0;
  Spans spans;
};

// All that the ranks hold of a prompt, on any medium, after holes too. All its tokens must be ready.
// For explanations: O(blocks of the prompt × owners).
std::vector<Holding> find_holdings(const Shared& shared, const std::vector<RankSlot>& ranks,
                                   const Query& query);

}  // namespace kvindex
