#include "bindings/answer.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "bindings/columns.hpp"
#include "bindings/unicode.hpp"
#include "core/rank_rows.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvindex {

namespace {

const FoundRank* find(const Answer& answer, uint32_t rank) {
  for (const FoundRank& found : answer.ranks) {
    if (found.rank == rank) return &found;
  }
  return nullptr;
}

// (rank id, blocks, tokens, block size, {medium: blocks}, device tokens, host tokens, upper bound,
// lower bound)
nb::tuple plain(const Answer& answer, const FoundRank& found) {
  nb::dict media;
  for (uint32_t i = 0; i < found.media_count; ++i) {
    const MediumBlocks& medium = answer.media[found.media_begin + i];
    media[unicode(*medium.medium)] = medium.blocks;
  }
  return nb::make_tuple(found.rank, found.blocks(), found.tokens, found.block_size, media,
                        found.device_tokens, found.host_tokens, found.upper_bound,
                        found.lower_bound);
}

nb::list longest(const Answer& answer) {
  std::vector<const FoundRank*> sorted;
  sorted.reserve(answer.ranks.size());
  for (const FoundRank& found : answer.ranks) {
    if (found.tokens != 0) sorted.push_back(&found);
  }
  std::sort(sorted.begin(), sorted.end(), [](const FoundRank* a, const FoundRank* b) {
    return a->tokens != b->tokens ? a->tokens > b->tokens : a->order < b->order;
  });
  nb::list ids;
  for (const FoundRank* found : sorted) ids.append(found->rank);
  return ids;
}

// Write the answer into columns that are all zero.
void hits(const PyAnswer& self, const RankRows& rows, nb::handle live, nb::handle device,
          nb::handle host, nb::handle tokens, nb::handle block_size) {
  const size_t n = rows.size();
  std::optional<Mask> mask;
  if (!live.is_none()) mask.emplace(live, "live", n);
  const Column<int64_t> devices(device, "device", n);
  const Column<int64_t> hosts(host, "host", n);
  const Column<int64_t> all(tokens, "tokens", n);
  const Column<int64_t> sizes(block_size, "block_size", n);
  fill_hits(self.answer, rows, mask ? mask->data() : nullptr,
            {devices.data(), hosts.data(), all.data(), sizes.data()});
}

}  // namespace

void bind_answer(nb::module_& module) {
  nb::class_<RankRows>(module, "RankRows")
      .def(nb::init<const std::vector<std::optional<uint32_t>>&>(), "ids"_a);
  nb::class_<PyAnswer>(module, "Answer")
      .def_prop_ro("best", [](const PyAnswer& self) -> std::optional<nb::tuple> {
        if (self.answer.best < 0) return std::nullopt;
        return plain(self.answer, self.answer.ranks[static_cast<size_t>(self.answer.best)]);
      })
      .def("get", [](const PyAnswer& self, uint32_t rank) -> std::optional<nb::tuple> {
        const FoundRank* found = find(self.answer, rank);
        if (found == nullptr) return std::nullopt;
        return plain(self.answer, *found);
      })
      .def("hits", &hits, "rows"_a, "live"_a.none(), "device"_a, "host"_a, "tokens"_a,
           "block_size"_a)
      // (block size, lower bound) of a rank that holds nothing
      .def("nothing", [](const PyAnswer& self, uint32_t rank) {
        for (const RankSize& size : *self.answer.sizes) {
          if (size.rank == rank) return nb::make_tuple(size.block_size, size.places_missing);
        }
        return nb::make_tuple(0u, false);
      })
      .def("units", [](const PyAnswer& self) {
        nb::dict all;
        for (const RankSize& size : *self.answer.sizes) all[nb::int_(size.rank)] = size.unit;
        return all;
      })
      .def("longest", [](const PyAnswer& self) { return longest(self.answer); });
}

}  // namespace kvindex
