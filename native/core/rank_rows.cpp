#include "core/rank_rows.hpp"

#include <bit>

namespace kvindex {

RankRows::RankRows(const std::vector<std::optional<uint32_t>>& ids)
    : size_(ids.size()), mask_(std::bit_ceil(ids.size() * 2 + 1) - 1), places_(mask_ + 1) {
  for (uint32_t row = 0; row < ids.size(); ++row) {
    if (!ids[row]) continue;
    size_t i = place(*ids[row]);
    while (places_[i].row != kNone) i = (i + 1) & mask_;
    places_[i] = {*ids[row], row};
  }
}

void fill_hits(const Answer& answer, const RankRows& rows, const uint8_t* live,
               const HitColumns& columns) {
  for (const FoundRank& found : answer.ranks) {
    const uint32_t row = rows.row_of(found.rank);
    if (row == RankRows::kNone || (live != nullptr && live[row] == 0)) continue;
    columns.device[row] = static_cast<int64_t>(found.device_tokens);
    columns.host[row] = static_cast<int64_t>(found.host_tokens);
    columns.tokens[row] = static_cast<int64_t>(found.tokens);
  }
  for (const RankSize& size : *answer.sizes) {
    const uint32_t row = rows.row_of(size.rank);
    if (row != RankRows::kNone) columns.block_size[row] = size.block_size;
  }
}

}  // namespace kvindex
