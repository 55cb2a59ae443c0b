// An answer as columns, one row for each rank of a list: what a router counts with.
//
// The Python twin is `PlainContents.hits` in kvindex/index/match.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/matching.hpp"

namespace kvindex {

// Which row a rank has. Immutable.
class RankRows {
 public:
  static constexpr uint32_t kNone = 0xffffffffu;

  // The rank of each row, each once; none where a row's rank is not known.
  explicit RankRows(const std::vector<std::optional<uint32_t>>& ids);

  size_t size() const { return size_; }
  // A rank's row, or kNone.
  uint32_t row_of(uint32_t id) const {
    for (size_t i = place(id);; i = (i + 1) & mask_) {
      if (places_[i].row == kNone || places_[i].id == id) return places_[i].row;
    }
  }

 private:
  struct Place {
    uint32_t id = 0;
    uint32_t row = kNone;
  };

  size_t place(uint32_t id) const { return (id * 0x9e3779b1u) & mask_; }

  size_t size_;
  size_t mask_;  // half of the places at least are free
  std::vector<Place> places_;
};

// One value for each row, all zero before.
struct HitColumns {
  int64_t* device = nullptr;
  int64_t* host = nullptr;
  int64_t* tokens = nullptr;
  int64_t* block_size = nullptr;
};

// Fill the columns in. Rows whose byte in `live` is 0 get their block size only; null: all are live.
void fill_hits(const Answer& answer, const RankRows& rows, const uint8_t* live,
               const HitColumns& columns);

}  // namespace kvindex
