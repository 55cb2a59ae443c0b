// What a router counts with: rows of ranks, and the choice of the cheapest, against plain models.
#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <vector>

#include "core/choosing.hpp"
#include "core/rank_rows.hpp"
#include "tests/expect.hpp"

namespace {

using namespace kvindex;
using namespace kvindex::tests;

constexpr double kInfinite = std::numeric_limits<double>::infinity();

// Every rank is found at its row, and no other is; ids may lie close together or far apart.
void test_rank_rows(Choices& choices, uint64_t universe) {
  std::map<uint32_t, uint32_t> model;
  std::vector<std::optional<uint32_t>> ids(choices.below(100));
  for (uint32_t row = 0; row < ids.size(); ++row) {
    const uint32_t id = choices.below(universe);
    if (choices.once_in(8) || model.contains(id)) continue;
    ids[row] = id;
    model[id] = row;
  }
  const RankRows rows(ids);
  EXPECT(rows.size() == ids.size());
  for (int i = 0; i < 1000; ++i) {
    const uint32_t id = choices.below(universe);
    EXPECT(rows.row_of(id) == (model.contains(id) ? model[id] : RankRows::kNone));
  }
  EXPECT(rows.row_of(0xffffffffu) == RankRows::kNone);
}

void test_hits_are_written_to_their_rows_only() {
  Answer answer;
  answer.sizes = std::make_shared<const RankSizes>(RankSizes{{7, 16, 16}, {8, 32, 32}, {9, 64, 64}});
  FoundRank found;
  found.rank = 8;
  found.device_tokens = 32;
  found.host_tokens = 64;
  found.tokens = 96;
  answer.ranks.push_back(found);
  found.rank = 9;  // has no row
  answer.ranks.push_back(found);
  const RankRows rows({std::nullopt, 8, 7});
  for (const bool is_live : {false, true}) {
    std::vector<int64_t> device(3), host(3), tokens(3), sizes(3);
    const uint8_t live[] = {1, is_live, 1};
    fill_hits(answer, rows, live, {device.data(), host.data(), tokens.data(), sizes.data()});
    EXPECT((device == std::vector<int64_t>{0, is_live ? 32 : 0, 0}));
    EXPECT((host == std::vector<int64_t>{0, is_live ? 64 : 0, 0}));
    EXPECT((tokens == std::vector<int64_t>{0, is_live ? 96 : 0, 0}));
    EXPECT((sizes == std::vector<int64_t>{0, 32, 16}));
  }
}

// Columns of any length, of few different values, so that many rows cost the same.
struct Columns {
  Columns(Choices& choices, size_t rows)
      : device(rows), host(rows), tokens(rows), queued(rows), open(rows), given(rows),
        contexts(rows), cache(rows), usable(rows) {
    for (size_t row = 0; row < rows; ++row) {
      device[row] = 16 * choices.below(3);
      host[row] = device[row] + 16 * choices.below(2);
      tokens[row] = host[row] + 16 * choices.below(2);
      queued[row] = choices.below(3);
      open[row] = choices.once_in(20) ? std::nan("") : choices.below(2);
      given[row] = choices.once_in(20) ? std::nan("") : choices.below(2);
      contexts[row] = choices.below(40);
      cache[row] = 16 * choices.below(3);
      usable[row] = !choices.once_in(4);
    }
  }

  ChoiceColumns view() const {
    return {usable.size(), device.data(), host.data(),     tokens.data(), queued.data(),
            open.data(),   given.data(),  contexts.data(), cache.data(),  usable.data()};
  }

  std::vector<int64_t> device, host, tokens;
  std::vector<double> queued, open, given, contexts, cache;
  std::vector<uint8_t> usable;
};

// The row that is chosen is usable, as cheap as any of those it is among, and the nth of its equals.
void test_choice(Choices& choices) {
  const Columns columns(choices, choices.below(20));
  const size_t rows = columns.usable.size();
  const Weights weights{.device = 1, .host = 0.5, .storage = 0.25, .fresh = 1, .queued = 16,
                        .request = 16,
                        .backlog = static_cast<double>(choices.below(2)),
                        .churn = static_cast<double>(choices.below(2)),
                        .keep = static_cast<double>(choices.below(2)),
                        .full = 0.5};
  std::vector<double> costs(rows);
  std::vector<int64_t> winners;
  for (int tenth = 0; tenth < 10; ++tenth) {
    const Chosen chosen = choose(64, columns.view(), weights, tenth / 10.0, costs.data());
    std::vector<size_t> all;
    int64_t attainable = 0;
    for (size_t row = 0; row < rows; ++row) {
      EXPECT(columns.usable[row] != 0 || costs[row] == kInfinite);
      EXPECT(std::isnan(columns.open[row]) ? costs[row] == kInfinite : costs[row] >= 0);
      if (columns.usable[row] == 0) continue;
      all.push_back(row);
      attainable = std::max(attainable, columns.tokens[row]);
    }
    EXPECT(chosen.attainable == attainable);
    EXPECT((chosen.row == -1) == all.empty());
    if (all.empty()) continue;
    double least = kInfinite;
    for (const size_t row : all) least = std::min(least, costs[row]);
    EXPECT(std::count(all.begin(), all.end(), static_cast<size_t>(chosen.row)) == 1);
    EXPECT(costs[static_cast<size_t>(chosen.row)] == least);
    winners.push_back(chosen.row);
  }
  EXPECT(std::is_sorted(winners.begin(), winners.end()));
}

}  // namespace

int main() {
  test_hits_are_written_to_their_rows_only();
  for (int seed = 0; seed < rounds(300); ++seed) {
    Choices choices(static_cast<uint64_t>(seed));
    test_rank_rows(choices, 150);
    test_rank_rows(choices, uint64_t{1} << 32);
    test_choice(choices);
  }
}
